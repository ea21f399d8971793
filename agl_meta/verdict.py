"""The verdict on a pass: what was expected, what came, and whether the rows say what upstream logged."""

from __future__ import annotations

import collections
import contextlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import attrs

from agl_meta.context import split_name
from agl_meta.rows import MISSING, STATUSES, SUCCEEDED

COMPLETE = "complete"
INCOMPLETE = "incomplete"

_MAX_WHY = 500
"""Characters of a cause in a summary; all of it stands in the row."""

_ROUNDING = 1e-6
"""Of float32, in a mean."""

_METRIC_PREFIX = {"val": "val", "train": "training"}


@attrs.frozen(kw_only=True)
class RolloutFacts:
    """What the metrics and the verdict need of one row."""

    rollout_id: str
    sample_key: str | None
    repeat_index: int | None
    status: str
    error: Mapping[str, Any] | None
    reward: Any
    """As upstream has it."""
    is_reward_dropped: bool
    """Whether the agent gave a reward that upstream does not have."""
    reward_used: Any
    response_tokens: tuple[int, ...]
    """Tokens of each turn's response; empty for a rollout without turns."""
    has_data_source: bool
    """Whether its sample has that field; upstream takes ``None`` for a source like any other."""
    data_source: Any
    lost: Mapping[str, int]


class Tally:
    """Counts the rows of a pass."""

    def __init__(self) -> None:
        self._facts: list[RolloutFacts] = []

    def add(self, facts: RolloutFacts) -> None:
        """Count one row."""
        self._facts.append(facts)

    def counts(self) -> dict[str, int]:
        """How many rows have each status."""
        found = [facts.status for facts in self._facts]
        return {status: found.count(status) for status in STATUSES}

    def not_succeeded(self) -> list[dict[str, Any]]:
        """Each rollout that did not succeed, and why."""
        return [
            {
                "rollout_id": facts.rollout_id,
                "sample_key": facts.sample_key,
                "repeat_index": facts.repeat_index,
                "status": facts.status,
                "why": _why(facts.error),
            }
            for facts in self._facts
            if facts.status != SUCCEEDED
        ]

    def lost(self) -> dict[str, int]:
        """What rollouts wanted to save and could not: how often, by cause."""
        found: collections.Counter[str] = collections.Counter()
        for facts in self._facts:
            found.update(facts.lost)
        return dict(found)

    def rewards(self) -> dict[str, Any]:
        """Mean rewards, over what is a number; missing, NaN and dropped ones are counted apart."""
        raw = [number(facts.reward) for facts in self._facts if facts.reward is not None]
        used = [number(facts.reward_used) for facts in self._facts if facts.status != MISSING]
        return {
            "mean": mean(value for value in raw if not math.isnan(value)),
            "mean_used": mean(used),
            "without_reward": sum(facts.reward is None for facts in self._facts),
            "nan": sum(map(math.isnan, raw)),
            "dropped": sum(facts.is_reward_dropped for facts in self._facts),
        }

    def metrics(self, is_train: bool) -> dict[str, float]:
        """What upstream logs for these rollouts, from ``get_test_metrics`` and ``get_train_data_batch``."""
        facts = [facts for facts in self._facts if facts.status != MISSING]
        prefix = _METRIC_PREFIX[split_name(is_train)]
        if is_train:
            found = _group_metrics(prefix, facts)
            return {f"{prefix}/{name}": found[f"{prefix}/{name}"] for name in _TRAIN_METRICS}
        by_source: dict[Any, tuple[list[str], list[RolloutFacts]]] = {}
        for fact in facts:
            # Upstream leaves rollouts without turns out of the numbers of their source.
            if fact.response_tokens and fact.has_data_source:
                with contextlib.suppress(Exception):  # of one that can't be a key; upstream raises, too
                    names, group = by_source.setdefault(fact.data_source, ([], []))
                    names.append(_safe_text(fact.data_source))
                    group.append(fact)
        # Where sources share a name, as 1 and "1" do, upstream keeps the numbers of one of them, by the order
        # in which rollouts came: there is nothing to compare.
        sources_of = collections.Counter(name for names, _ in by_source.values() for name in set(names))
        result = {}
        for names, group in by_source.values():
            if sources_of[names[0]] == 1:
                result.update(_group_metrics(f"{prefix}/{names[0]}", group))
        return {**result, **_group_metrics(prefix, facts)}

    def scales(self, is_train: bool) -> dict[str, float]:
        """How large the values are that each of :meth:`metrics` is the mean of: rewards may cancel out."""
        sizes = Tally()
        for facts in self._facts:
            sizes.add(attrs.evolve(facts, reward_used=abs(number(facts.reward_used))))
        return sizes.metrics(is_train)


_TRAIN_METRICS = ("n_rollouts", "n_rollouts_w_trace", "n_rollouts_w_reward", "reward")


def _group_metrics(prefix: str, facts: list[RolloutFacts]) -> dict[str, float]:
    lengths = [fact.response_tokens for fact in facts if fact.response_tokens]
    return {
        f"{prefix}/n_rollouts": len(facts),
        f"{prefix}/n_rollouts_w_trace": len(lengths),
        f"{prefix}/n_rollouts_w_reward": sum(fact.reward is not None for fact in facts),
        f"{prefix}/reward": mean(number(fact.reward_used) for fact in facts),
        f"{prefix}/mean_response_length": mean(mean(turns) for turns in lengths),
        f"{prefix}/sum_response_length": mean(float(sum(turns)) for turns in lengths),
        f"{prefix}/turn_count": mean(float(len(turns)) for turns in lengths),
    }


def differences(
    logged: Mapping[str, Any], recomputed: Mapping[str, float], scales: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Metrics that both have and that differ; NaN equals NaN, and rounding of float32 is no difference.

    Args:
        logged: as upstream has them.
        recomputed: as the rows have them.
        scales: how large the values are that each is the mean of; what rounding does to it grows with these.
    """
    found = []
    for name, ours in recomputed.items():
        if name not in logged:
            continue
        theirs = number(logged[name])
        is_close = math.isclose(theirs, ours, rel_tol=0.0, abs_tol=_ROUNDING * scales[name])
        if not is_close and not (math.isnan(theirs) and math.isnan(ours)):
            found.append({"metric": name, "logged": theirs, "from_rows": ours})
    return found


def reasons_incomplete(expected: int, counts: Mapping[str, int], ended: bool) -> list[str]:
    """Why a pass is not complete; empty if it is."""
    reasons = []
    if not ended:
        reasons.append("the training was interrupted before upstream had evaluated the pass")
    if counts[MISSING]:
        reasons.append(f"{counts[MISSING]} rollouts were queued and never finished")
    rows = sum(counts.values())
    if rows < expected:
        reasons.append(f"{expected - rows} of {expected} expected rollouts were never queued")
    if rows > expected:
        reasons.append(f"{rows} rollouts were queued where {expected} were expected")
    return reasons


def mean(values: Iterable[float]) -> float:
    """The mean; NaN of nothing, as numpy's."""
    numbers = list(values)
    if not numbers:
        return math.nan
    try:
        return math.fsum(numbers) / len(numbers)
    except (ValueError, OverflowError):  # inf - inf, and overflow, where numpy gives nan and inf
        return sum(numbers) / len(numbers)


def number(value: Any) -> float:
    """A reward or metric as a float; NaN for what is none."""
    if type(value) is float:
        return value
    try:
        return float(value)
    except Exception:  # a user's own type may raise anything
        return math.nan


def _why(error: Mapping[str, Any] | None) -> str | None:
    if error is None:
        return None
    kind, message = error.get("type"), error.get("message")
    why = f"{kind}: {message}" if kind else str(message)
    return why if len(why) <= _MAX_WHY else f"{why[: _MAX_WHY - 1]}…"


def _safe_text(value: Any) -> str:
    try:
        return f"{value}"
    except Exception:
        return f"<{type(value).__name__}>"
