"""The counting dataloader against torchdata's real StatefulDataLoader, as verl uses it."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from agl_meta.verl.positions import STATE_KEY, CountingDataLoader

BATCHES = 4


def make_loader(workers: int = 0) -> CountingDataLoader:
    return CountingDataLoader(StatefulDataLoader(list(range(BATCHES)), 1, num_workers=workers))


def saved(loader: CountingDataLoader) -> dict[str, Any]:
    """The state as verl's checkpoint holds it."""
    file = io.BytesIO()
    torch.save(loader.state_dict(), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def steps(loader: Any, count: int, passes: int = 10) -> list[tuple[int, int, int]]:
    """Train ``count`` steps like ``fit()`` does; gives (epoch, batch_index, sample) of each."""
    seen = []
    for _ in range(passes):
        for batch in loader:
            seen.append((loader.epoch, loader.batch_index, int(batch[0])))
            if len(seen) == count:
                return seen
    return seen


def expected(first: int, count: int) -> list[tuple[int, int, int]]:
    return [(n // BATCHES, n % BATCHES, n % BATCHES) for n in range(first, first + count)]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("first", [1, 2, 4, 5, 7, 8, 9])
def test_resume_continues_the_count(first: int, workers: int) -> None:
    """After a resume at any step, epoch and batch_index are those of an uninterrupted training."""
    loader = make_loader(workers)
    steps(loader, first)
    state = saved(loader)
    resumed = make_loader(workers)
    resumed.load_state_dict(state)
    resumed.resume_at(first)
    assert resumed.epoch == (first - 1) // BATCHES
    assert steps(resumed, 6) == expected(first, 6)


@pytest.mark.parametrize("between", [1, 2, 3])
def test_second_resume_in_the_same_epoch(between: int) -> None:
    """A second resume counts on from the first one."""
    loader = make_loader()
    steps(loader, 5)
    for done in (5, 5 + between):
        state = saved(loader)
        loader = make_loader()
        loader.load_state_dict(state)
        loader.resume_at(done)
        assert steps(loader, between) == expected(done, between)


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("first", [1, 3, 4, 6, 8])
def test_checkpoint_of_upstream_alone(first: int, workers: int) -> None:
    """A checkpoint written without agl_meta gives the same numbers, taken from its step."""
    loader = make_loader(workers)
    steps(loader, first)
    state = saved(loader)
    del state[STATE_KEY]
    resumed = make_loader(workers)
    resumed.load_state_dict(state)
    resumed.resume_at(first)
    assert steps(resumed, 6) == expected(first, 6)


def test_upstream_alone_loads_our_checkpoint() -> None:
    """A plain StatefulDataLoader continues from a state that holds our key."""
    loader = make_loader()
    steps(loader, 2)
    plain = StatefulDataLoader(list(range(BATCHES)), 1)
    plain.load_state_dict(saved(loader))
    assert [int(batch[0]) for batch in plain] == [2, 3]


def test_checkpoint_without_dataloader_state() -> None:
    """Where verl finds no data.pt, the interrupted pass is left and a new one begins."""
    loader = make_loader()
    loader.resume_at(6)
    assert (loader.epoch, loader.batch_index) == (1, 1)
    assert steps(loader, 2) == [(2, 0, 0), (2, 1, 1)]


def test_several_batches_a_step_follow_the_loader(caplog: pytest.LogCaptureFixture) -> None:
    """Without our key, a loader that gave more batches than steps is believed, and that is logged."""
    loader = make_loader()
    steps(loader, 3)
    state = saved(loader)
    del state[STATE_KEY]
    resumed = make_loader()
    resumed.load_state_dict(state)
    with caplog.at_level("WARNING"):
        resumed.resume_at(2)  # dynamic sampling: three batches in two steps
    assert "batch_index follows the dataloader" in caplog.text
    assert steps(resumed, 1) == [(0, 3, 3)]


def test_a_new_fit_counts_from_the_beginning() -> None:
    """restart() forgets what an earlier fit, or a look at the data, has counted."""
    loader = make_loader()
    next(iter(loader))
    loader.restart()
    assert steps(loader, 5) == expected(0, 5)


def test_passes_the_rest_through() -> None:
    """Length, attributes and copies are the real loader's."""
    loader = make_loader()
    assert len(loader) == BATCHES
    assert loader.batch_size == 1
    assert len(copy.copy(loader)) == BATCHES
    with pytest.raises(AttributeError):
        loader.no_such_attribute  # noqa: B018
