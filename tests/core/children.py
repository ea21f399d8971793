"""Work in a forked child, for faults that would last in the process of the tests: rights, limits, signals."""

from __future__ import annotations

import os
import pickle
import signal
import stat
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

SECONDS = 120
"""A child that hangs is ended by a signal after that."""

_NOBODY = 65534


def start_child(work: Callable[[], Any]) -> Callable[[], Any]:
    """Fork a child that does ``work``; gives what waits for it and returns its result.

    Waiting raises :class:`AssertionError` for a child that raised or was ended by a signal.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        signal.alarm(SECONDS)
        try:
            answer = pickle.dumps((work(), None))
        except BaseException:
            answer = pickle.dumps((None, traceback.format_exc()))
        finally:
            # Whatever happens, this process must not go on with the tests of its parent.
            with open(writer, "wb") as pipe:
                pipe.write(answer)
            os._exit(0)
    os.close(writer)

    def wait() -> Any:
        with open(reader, "rb") as pipe:
            answer = pipe.read()
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == 0, f"the child ended with {code}"
        result, error = pickle.loads(answer)
        assert error is None, error
        return result

    return wait


def in_child(work: Callable[[], Any]) -> Any:
    """What ``work`` returns in a forked child; :class:`AssertionError` if it raises there."""
    return start_child(work)()


def as_nobody(folder: Path, work: Callable[[], Any]) -> Any:
    """As :func:`in_child`, in ``folder`` and without the rights of root, for whom no folder is read-only.

    ``work`` names files by relative paths: the folder of the tests is root's own.
    """

    def without_rights() -> Any:
        os.chdir(folder)
        if os.geteuid() == 0:
            os.setgroups([])
            os.setresgid(_NOBODY, _NOBODY, _NOBODY)
            os.setresuid(_NOBODY, _NOBODY, _NOBODY)
        return work()

    for path in (folder, *folder.rglob("*")):
        if os.geteuid() == 0 and not path.is_symlink():
            os.chown(path, _NOBODY, _NOBODY)
    os.chmod(folder, stat.S_IRWXU)
    return in_child(without_rights)
