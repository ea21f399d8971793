"""What the verdict computes anew from rows, against upstream's own function."""

from __future__ import annotations

import contextlib
import io
import warnings
from types import SimpleNamespace
from typing import Any

from agentlightning.types import RolloutLegacy, Triplet
from agentlightning.verl.daemon import AgentModeDaemon
from hypothesis import given, settings

from agl_meta.verdict import differences
from tests.core.test_verdict import FILL, Rollout, names_of_several_sources, rollouts, same, tally


def upstreams(found: list[Rollout]) -> dict[str, Any]:
    """``AgentModeDaemon.get_test_metrics`` of a daemon that holds these rollouts."""
    posted = {}
    for number, rollout in enumerate(found):
        triplets = [
            Triplet(prompt={"token_ids": [1]}, response={"token_ids": [1] * tokens})
            for tokens in rollout.turns
        ]
        # As v1 makes it: what stands for a reward is not looked at.
        posted[str(number)] = RolloutLegacy.model_construct(
            rollout_id=str(number), final_reward=rollout.reward, triplets=triplets
        )
    daemon: Any = SimpleNamespace(
        is_train=False,
        reward_fillna_value=FILL,
        _total_tasks_queued=len(posted),
        _completed_rollouts_v0=posted,
        _task_id_to_original_sample={str(number): rollout.sample for number, rollout in enumerate(found)},
    )
    daemon._fillna_reward = lambda rollout: AgentModeDaemon._fillna_reward(daemon, rollout)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, of means of nothing
        return dict(AgentModeDaemon.get_test_metrics(daemon))


@settings(deadline=None)
@given(rollouts)
def test_upstreams_own_metrics(found: list[Rollout]) -> None:
    """The same names, and nothing that differs."""
    ours = tally(*(rollout.facts for rollout in found))
    recomputed, logged = ours.metrics(is_train=False), upstreams(found)
    ambiguous = names_of_several_sources(found)
    assert {name for name in logged if name.rpartition("/")[0] not in ambiguous} == set(recomputed)
    assert differences(logged, recomputed, ours.scales(is_train=False)) == []
    if all(isinstance(rollout.reward, bool) or rollout.reward is None for rollout in found):
        assert same({name: float(logged[name]) for name in recomputed}, recomputed)
