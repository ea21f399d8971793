"""Whether a port that a server of upstream's needs is free; upstream itself fails without naming it."""

from __future__ import annotations

import socket
from typing import Any

from agl_meta.errors import ConfigurationError


def check_port(port: int, server: str, remedy: str) -> None:
    """Raise :class:`ConfigurationError` if nothing can listen on ``port`` of this machine."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        # As uvicorn does: a port that only waits for its last connections to expire is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError as error:
            raise ConfigurationError(
                f"Port {port} can't be used ({error.strerror}); agentlightning's {server} needs it. End the "
                f"other program, often an earlier training, or {remedy}."
            ) from error


def check_v0_port(port: int) -> None:
    """Check the port of the v0 server. Raises :class:`ConfigurationError`."""
    check_port(port, "v0 server", "set agentlightning.port in the config to a free port")


def check_store_port(trainer: Any) -> None:
    """Check the port of the store server that ``Trainer.fit`` is about to start in v1.

    Raises :class:`ConfigurationError`. Looks at an ``agl.Trainer``; does nothing where it starts no server.
    """
    strategy = getattr(trainer, "strategy", None)
    starts_server = (
        getattr(trainer, "_client", None) is None  # else it is v0, which has its own server
        and getattr(strategy, "managed_store", False)
        and getattr(strategy, "role", None) in ("algorithm", "both")
    )
    port = getattr(strategy, "server_port", None)
    if starts_server and isinstance(port, int) and port > 0:
        check_port(port, "store server", "give another one: agl.Trainer(port=…)")
