"""The verdict on a pass, against upstream's metrics written out anew in the plainest way."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agl_meta.rows import STATUSES
from agl_meta.verdict import RolloutFacts, Tally, differences, mean, reasons_incomplete

NAN = math.nan
FILL = 0.25
"""As upstream's ``reward_fillna_value``."""


@attrs.frozen
class Rollout:
    """What upstream's daemon holds of a rollout."""

    reward: Any
    turns: list[int]
    """Tokens of each turn's response."""
    sample: dict[str, Any]

    @property
    def facts(self) -> RolloutFacts:
        return facts(
            reward=self.reward,
            reward_used=FILL if self.reward is None else self.reward,
            response_tokens=tuple(self.turns),
            has_data_source="data_source" in self.sample,
            data_source=self.sample.get("data_source"),
        )


def facts(**more: Any) -> RolloutFacts:
    values: dict[str, Any] = {
        "rollout_id": "ro",
        "sample_key": "key",
        "repeat_index": 0,
        "status": "succeeded",
        "error": None,
        "reward": 1.0,
        "is_reward_dropped": False,
        "reward_used": 1.0,
        "response_tokens": (1,),
        "has_data_source": False,
        "data_source": None,
        "lost": {},
    }
    return RolloutFacts(**{**values, **more})


def tally(*all_facts: RolloutFacts) -> Tally:
    made = Tally()
    for each in all_facts:
        made.add(each)
    return made


def average(values: Sequence[Any]) -> float:
    """As numpy's ``mean``, without its rounding."""
    numbers = [float(value) for value in values]
    if not numbers or any(map(math.isnan, numbers)) or {math.inf, -math.inf} <= set(numbers):
        return NAN
    for infinite in (math.inf, -math.inf):
        if infinite in numbers:
            return infinite
    return float(sum(map(Fraction, numbers)) / len(numbers))


def upstreams(rollouts: Sequence[Rollout], mean_of: Callable[[Sequence[Any]], float] = average) -> Any:
    """``get_test_metrics`` of agentlightning 0.3.0's daemon, without its repetitions."""
    every: list[dict[str, Any]] = []
    by_source: dict[Any, list[dict[str, Any]]] = {}
    for rollout in rollouts:
        stat = {
            "reward": FILL if rollout.reward is None else rollout.reward,
            "has_reward": rollout.reward is not None,
        }
        if rollout.turns:
            stat["sum_response_length"] = sum(rollout.turns)
            stat["mean_response_length"] = mean_of(rollout.turns)
            stat["turn_count"] = len(rollout.turns)
            if "data_source" in rollout.sample:
                by_source.setdefault(rollout.sample["data_source"], []).append(stat)
        every.append(stat)
    metrics: dict[str, Any] = {}
    for prefix, stats in [*((f"val/{source}", found) for source, found in by_source.items()), ("val", every)]:
        traced = [stat for stat in stats if "turn_count" in stat]
        metrics[f"{prefix}/n_rollouts"] = len(stats)
        metrics[f"{prefix}/n_rollouts_w_trace"] = len(traced)
        metrics[f"{prefix}/n_rollouts_w_reward"] = len([stat for stat in stats if stat["has_reward"]])
        metrics[f"{prefix}/reward"] = mean_of([stat["reward"] for stat in stats])
        for name in ("mean_response_length", "sum_response_length", "turn_count"):
            metrics[f"{prefix}/{name}"] = mean_of([stat[name] for stat in traced])
    return metrics


def one_by_one(values: Sequence[Any]) -> float:
    """A mean with as much rounding as there can be."""
    total = 0.0
    for value in values:
        total += value
    return total / len(values) if values else NAN


def same(first: Mapping[str, float], other: Mapping[str, float]) -> bool:
    return first.keys() == other.keys() and all(
        math.isclose(first[name], other[name], rel_tol=1e-9, abs_tol=1e-300)
        or (math.isnan(first[name]) and math.isnan(other[name]))
        for name in first
    )


rewards = (
    st.none()
    | st.booleans()
    | st.integers(-(10**30), 10**30)
    | st.floats(-1e300, 1e300)
    | st.sampled_from([NAN, math.inf, -math.inf, 0.0, -0.0, 5e-324, 1e-12, 1e16, -1e16])
)
turns = st.lists(st.integers(0, 10_000), max_size=4)
SOURCES = (1, 1.0, "1", True, None, "None", "", "a", "a/b", (1,), NAN, "\ud800", 1 << 2000, math.inf)
samples = st.just({}) | st.sampled_from(SOURCES).map(lambda source: {"data_source": source})
rollouts = st.lists(st.builds(Rollout, rewards, turns, samples), max_size=12)


def names_of_several_sources(found: Sequence[Rollout]) -> set[str]:
    """Prefixes under which upstream logs now one source and now another."""
    sources = [r.sample["data_source"] for r in found if r.turns and "data_source" in r.sample]
    groups: dict[Any, set[str]] = {}
    for source in sources:
        groups.setdefault(source, set()).add(f"val/{source}")
    every = [name for names in groups.values() for name in names]
    return {name for name in every if every.count(name) > 1}


@settings(deadline=None)
@given(rollouts)
def test_metrics_of_an_evaluation(found: list[Rollout]) -> None:
    """They are upstream's, whatever the rewards, sources and turns."""
    ambiguous = names_of_several_sources(found)
    expected = {
        name: value for name, value in upstreams(found).items() if name.rpartition("/")[0] not in ambiguous
    }
    ours = tally(*(rollout.facts for rollout in found)).metrics(is_train=False)
    assert same(ours, expected), (ours, expected)


@settings(deadline=None)
@given(rollouts, st.randoms(use_true_random=False))
def test_no_difference_is_made_up(found: list[Rollout], random: Any) -> None:
    """In whatever order upstream got the rollouts, and whatever was lost in rounding."""
    ours = tally(*(rollout.facts for rollout in found))
    random.shuffle(found)
    logged = upstreams(found, one_by_one)
    assert differences(logged, ours.metrics(is_train=False), ours.scales(is_train=False)) == []


@settings(deadline=None)
@given(rollouts, st.floats(2e-6, 10), st.booleans())
def test_every_difference_is_seen(found: list[Rollout], by: float, up: bool) -> None:
    """A reward that is off by a millionth of the rewards is named, be they large or small, and no other."""
    ours = tally(*(rollout.facts for rollout in found))
    recomputed, scales = ours.metrics(is_train=False), ours.scales(is_train=False)
    logged = dict(recomputed)
    if not 1e-290 < scales["val/reward"] < 1e300:
        return
    step = by * scales["val/reward"] * (1 if up else -1)
    if abs(logged["val/reward"] + step - logged["val/reward"]) < abs(step) / 1.5:  # too small for a float
        return
    logged["val/reward"] += step
    assert [each["metric"] for each in differences(logged, recomputed, scales)] == ["val/reward"]


@settings(deadline=None)
@given(rollouts)
def test_metrics_of_a_training_step(found: list[Rollout]) -> None:
    """Four of them, of all rollouts, under upstream's other prefix."""
    everything = upstreams(found)
    names = ("n_rollouts", "n_rollouts_w_trace", "n_rollouts_w_reward", "reward")
    ours = tally(*(rollout.facts for rollout in found)).metrics(is_train=True)
    assert same(ours, {f"training/{name}": everything[f"val/{name}"] for name in names})


class NoKey:
    """Neither a key nor text."""

    def _refuse(self, *_: Any) -> Any:
        raise ZeroDivisionError("never")

    __hash__ = __eq__ = __str__ = __repr__ = __format__ = _refuse  # type: ignore[assignment]


class NoText(NoKey):
    """A key without text."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


@pytest.mark.parametrize("source", [[1], {"a": 1}, {1}, NoKey(), NoText()], ids=lambda s: type(s).__name__)
def test_source_that_upstream_can_not_take(source: Any) -> None:
    """Upstream raises; here the rollout counts in the whole, and the other sources are as they were."""
    odd = Rollout(0.5, [3], {"data_source": source})
    plain = Rollout(1.0, [1], {"data_source": "a"})
    ours = tally(plain.facts, odd.facts).metrics(is_train=False)
    alone = tally(plain.facts).metrics(is_train=False)
    assert {name: ours[name] for name in ours if name.startswith("val/a/")} == {
        name: alone[name] for name in alone if name.startswith("val/a/")
    }
    assert (ours["val/n_rollouts"], ours["val/reward"]) == (2, 0.75)


def test_reward_that_is_no_number() -> None:
    """It makes the mean NaN, and is counted; so does one that no float can hold."""
    for reward in ("text", [1.0], NoKey(), 1 << 2000, None):
        ours = tally(facts(reward=reward, reward_used=reward), facts())
        assert math.isnan(ours.metrics(is_train=False)["val/reward"])
        assert ours.rewards()["nan"] == (reward is not None)
        assert ours.rewards()["mean"] == 1.0


def float32(value: float) -> float:
    return float(struct.unpack("f", struct.pack("f", value))[0])


def test_rounding_of_float32() -> None:
    """Rewards of numpy's float32 are averaged as such upstream, also where they cancel out."""
    values = [float32(value) for value in (0.1, 1e4, 0.7, -1e4, 0.3)]
    total = 0.0
    for value in values:
        total = float32(total + value)
    ours = tally(*(facts(reward=value, reward_used=value) for value in values))
    logged, recomputed = {"val/reward": float32(total / 5)}, ours.metrics(is_train=False)
    assert abs(logged["val/reward"] - recomputed["val/reward"]) > 1e-5
    assert differences(logged, recomputed, ours.scales(is_train=False)) == []


@pytest.mark.parametrize(
    ("logged", "rewards", "is_different"),
    [
        (0.0, [0.0, 0.0], False),
        (-0.0, [0.0], False),
        (1e-12, [0.0], True),
        (1e-12, [2e-12], True),
        (2e-12, [2e-12], False),
        (1e9, [1e9 + 1], False),
        (1e9, [1e9 + 1e5], True),
        (NAN, [NAN, 1.0], False),
        (0.5, [NAN, 1.0], True),
        (NAN, [1.0], True),
        (math.inf, [math.inf], False),
        (-math.inf, [math.inf], True),
        (math.inf, [1.0], True),
        (1.0, [math.inf], True),
        (NAN, [math.inf, -math.inf], False),
        (NAN, [], False),
        (0.0, [], True),
        ("text", [1.0], True),
        (None, [1.0], True),
    ],
)
def test_what_differs(logged: Any, rewards: list[float], is_different: bool) -> None:
    """The tolerance is of the size of the rewards: there is none between zero and something."""
    ours = tally(*(facts(reward=value, reward_used=value) for value in rewards))
    found = differences({"val/reward": logged}, ours.metrics(is_train=False), ours.scales(is_train=False))
    assert bool(found) == is_different
    if found and isinstance(logged, float):
        assert found[0]["metric"] == "val/reward"
        assert str(found[0]["logged"]) == str(logged)


@settings(deadline=None)
@given(st.lists(st.floats() | st.sampled_from([1.7e308, -1.7e308])))
def test_mean(values: list[float]) -> None:
    """The true mean; where the sum overflows on the way, what adding one by one gives is as good."""
    ours, true, plain = mean(values), average(values), one_by_one(values)
    assert any(
        math.isclose(ours, other, rel_tol=1e-15, abs_tol=5e-324) or (math.isnan(ours) and math.isnan(other))
        for other in ((true,) if math.isfinite(plain) else (true, plain))
    )


def test_mean_of_what_overflows() -> None:
    """It is what numpy gives, and no error."""
    assert mean([1.7e308] * 3) == math.inf
    assert mean([-1.7e308] * 3) == -math.inf


statuses = st.sampled_from(STATUSES)


@settings(deadline=None)
@given(st.lists(st.tuples(statuses, st.none() | st.floats(), st.booleans())))
def test_counts(given_facts: list[tuple[str, Any, bool]]) -> None:
    """Each row has one status; missing ones are in no metric, and the others in all."""
    made = tally(
        *(
            facts(
                rollout_id=str(n), status=status, reward=reward, reward_used=reward, is_reward_dropped=dropped
            )
            for n, (status, reward, dropped) in enumerate(given_facts)
        )
    )
    found = [status for status, _, _ in given_facts]
    counts = made.counts()
    assert counts == {status: found.count(status) for status in STATUSES}
    assert [each["rollout_id"] for each in made.not_succeeded()] == [
        str(n) for n, status in enumerate(found) if status != "succeeded"
    ]
    assert made.metrics(is_train=True)["training/n_rollouts"] == len(found) - found.count("missing")
    summary = made.rewards()
    given_rewards = [reward for _, reward, _ in given_facts]
    assert summary["without_reward"] == given_rewards.count(None)
    assert summary["nan"] == sum(reward is not None and math.isnan(reward) for reward in given_rewards)
    assert summary["dropped"] == sum(dropped for *_, dropped in given_facts)


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(1, 9))))
def test_losses_are_added_up(lost: list[dict[str, int]]) -> None:
    """By cause, over all rows."""
    expected = {cause: sum(each.get(cause, 0) for each in lost) for cause in set().union(*lost)}
    assert tally(*(facts(lost=each) for each in lost)).lost() == expected


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (None, None),
        ({"type": "E", "message": "m"}, "E: m"),
        ({"type": None, "message": "m"}, "m"),
        ({"message": None}, "None"),
        ({"type": "E", "message": "x" * 600}, "E: " + "x" * 496 + "…"),
    ],
)
def test_why(error: Any, why: str | None) -> None:
    """A cause in a summary is short."""
    ((found),) = tally(facts(status="failed", error=error)).not_succeeded()
    assert found["why"] == why


@settings(deadline=None)
@given(st.integers(0, 20), st.lists(statuses, max_size=20), st.booleans())
def test_reasons(expected: int, found: list[str], ended: bool) -> None:
    """A pass is complete if and only if it ended and something came of exactly what was expected."""
    counts = {status: found.count(status) for status in STATUSES}
    reasons = reasons_incomplete(expected, counts, ended)
    is_complete = ended and len(found) == expected and "missing" not in found
    assert (reasons == []) == is_complete
    text = "; ".join(reasons)
    assert ("interrupted" in text) == (not ended)
    assert (f"{found.count('missing')} rollouts were queued and never finished" in text) == (
        "missing" in found
    )
    assert (f"{expected - len(found)} of {expected} expected rollouts were never queued" in text) == (
        len(found) < expected
    )
    assert (f"{len(found)} rollouts were queued where {expected} were expected" in text) == (
        len(found) > expected
    )
