"""Stragglers: results of rollouts whose pass was assembled already, added to that pass and flagged.

v0 hands a task that timed out to a second worker, and the first may still post; v1 marks an attempt as timed
out, and its runner may still finish it. Neither changes what the metrics took.
"""

from __future__ import annotations

import collections
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agl_meta.assembly import Result, late_line
from agl_meta.faults import faults
from agl_meta.files import AnyPath, any_path, read_lines
from agl_meta.remote import put
from agl_meta.rows import TIMEOUT
from agl_meta.storage import LATE_FILE, open_rows, write_all
from agl_meta.verl.results import Texts, in_loop, result_v0, result_v1

_MAX_KNOWN = 200_000
_MAX_WATCHED = 1_000


class LateResults:
    """What is still to come of assembled passes.

    Args:
        root: the output folder; ``None`` if nothing is saved.
        keep_special_tokens: as for other rows.
    """

    def __init__(self, root: str | None, keep_special_tokens: bool) -> None:
        self._root = root
        self._keep_special_tokens = keep_special_tokens
        self._pass_of: collections.OrderedDict[str, str] = collections.OrderedDict()
        self._posted: list[Any] = []
        self._watched: collections.deque[tuple[str, str]] = collections.deque(maxlen=_MAX_WATCHED)

    def watch(
        self, pass_path: str | None, queued: Iterable[str], results: Mapping[str, Sequence[Result]]
    ) -> None:
        """Take note of a recorded batch: its rollouts, and its attempts that may still finish."""
        if self._root is None or pass_path is None:
            return
        self._pass_of.update(dict.fromkeys(queued, pass_path))
        while len(self._pass_of) > _MAX_KNOWN:
            self._pass_of.popitem(last=False)
        for rollout_id, found in results.items():
            for result in found:
                if result.status == TIMEOUT and result.attempt_id is not None:
                    self._watched.append((rollout_id, result.attempt_id))

    def posted(self, rollout: Any) -> None:
        """v0: a rollout of another batch was posted. One of another run is not ours to file."""
        if rollout.rollout_id in self._pass_of:
            self._posted.append(rollout)

    def flush(self, daemon: Any) -> None:
        """File what has come meanwhile."""
        if not self._posted and not self._watched:
            return
        with faults.guard("filing late rollouts"):
            texts = Texts(daemon.tokenizer, self._keep_special_tokens)
            posted, self._posted = self._posted, []
            for rollout in posted:
                self._file(rollout.rollout_id, result_v0(rollout, None, texts))
            if self._watched:
                for rollout_id, result in in_loop(
                    daemon._internal_loop, self._finished(daemon, texts), len(self._watched)
                ):
                    self._file(rollout_id, result)

    def finish(self, daemon: Any) -> None:
        """File what has come and was not asked for yet."""
        with faults.guard("filing late rollouts"):
            if daemon.mode == "v0" and self._pass_of and daemon.server.loop is not None:
                # Through the daemon's queue, which tells posted() of them.
                in_loop(daemon.server.loop, daemon.server.retrieve_completed_rollouts())
        self.flush(daemon)

    async def _finished(self, daemon: Any, texts: Texts) -> list[tuple[str, Result]]:
        store = getattr(daemon.store, "behind", daemon.store)
        found = []
        for watched in list(self._watched):
            rollout_id, attempt_id = watched
            attempts = await store.query_attempts(rollout_id)
            attempt = next((each for each in attempts if each.attempt_id == attempt_id), None)
            if attempt is None or attempt.status not in ("succeeded", "failed"):
                continue
            self._watched.remove(watched)
            spans = await store.query_spans(rollout_id, attempt_id=attempt_id)
            found.append((rollout_id, result_v1(attempt, spans, daemon, texts)))
        return found

    def _file(self, rollout_id: str, result: Result) -> None:
        with faults.guard("filing a late rollout"):  # one that fails costs no other
            self._append(rollout_id, result)

    def _append(self, rollout_id: str, result: Result) -> None:
        assert self._root is not None
        path = self._pass_of.get(rollout_id)
        if path is None:  # so late that it is known no more
            faults.record("filing a late rollout", "its pass is too long ago")
            return
        folder = any_path(self._root) / path
        row = _find_row(folder, rollout_id)
        if row is None:
            faults.record("filing a late rollout", f"its pass {folder} has no row of it")
            return
        line = late_line(row, result, folder)
        # One writer: only the run that made the pass knows these ids.
        if not isinstance(folder, Path):
            put(str(folder / f"late.{secrets.token_hex(6)}.jsonl"), line)
            return
        descriptor = os.open(
            folder / LATE_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666
        )
        try:
            write_all(descriptor, line)
        finally:
            os.close(descriptor)


def _find_row(folder: AnyPath, rollout_id: str) -> bytes | None:
    text = b'"rollout_id":"%b"' % rollout_id.encode("utf-8", "replace")
    with open_rows(folder) as file:
        contents = (line.content for line in read_lines(file))
        return next((content for content in contents if content is not None and text in content), None)
