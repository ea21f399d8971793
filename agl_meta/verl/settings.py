"""What a user sets for a training: the ``agl_meta`` node of the config, as a value."""

from __future__ import annotations

import importlib.util
from typing import Any

import attrs

from agl_meta.context import FSYNC
from agl_meta.errors import ConfigurationError

NODE = "agl_meta"
TRANSPORTS = ("files", "store")
DURABILITIES = ("process", FSYNC)
COMPRESSIONS = (None, "zstd")


@attrs.frozen(kw_only=True)
class Settings:
    """Settings of one training; plain data, so that they travel and are logged with the config."""

    output_dir: str | None = None
    """Absolute path of the output folder; ``None`` to stamp only."""
    sample_key: str | None = None
    """Field of the samples that names them; ``None`` for a hash of their content."""
    transport: str = "files"
    """How what rollouts save travels: ``"files"``, or ``"store"``."""
    durability: str = "process"
    """What a saved record outlives: ``"process"``, or ``"fsync"`` for a power loss, too."""
    compression: str | None = None
    """How assembled rows are compressed: ``None``, or ``"zstd"``."""
    record_train: bool = False
    """Whether training passes are assembled, too, and not only evaluations."""
    keep_special_tokens: bool = False
    """Whether the text of turns shows the tokenizer's special tokens."""
    dry_run: bool = False
    """Whether the worker group and the inference server are CPU stand-ins."""
    progress: bool | None = None
    """Whether a bar shows how far a pass is; ``None``: if the driver's stderr is a terminal."""

    @classmethod
    def from_config(cls, config: Any) -> Settings:
        """Read the node from a trainer's config; absent means all defaults.

        Raises :class:`ConfigurationError` for a name that is no setting, or a value that is none.
        """
        node = config.get(NODE) or {}
        known = [field.name for field in attrs.fields(cls)]
        unknown = sorted(set(node) - {*known, "callbacks"})
        if unknown:
            raise ConfigurationError(
                f"The config's {NODE!r} node has {', '.join(unknown)}; expected only "
                f"{', '.join(known)} and callbacks. Correct the name."
            )
        progress = node.get("progress")
        if progress is not None and not isinstance(progress, bool):
            raise ConfigurationError(
                f"progress is {progress!r}; expected True, False, or None for a bar if stderr is a "
                "terminal. Correct it."
            )
        settings = cls(**{name: node[name] for name in known if node.get(name) is not None})
        if settings.transport not in TRANSPORTS:
            raise ConfigurationError(
                f"transport is {settings.transport!r}; expected one of {', '.join(TRANSPORTS)}: files that "
                "runners write into output_dir, or the store, for runners that do not see that folder."
            )
        if settings.durability not in DURABILITIES:
            raise ConfigurationError(
                f"durability is {settings.durability!r}; expected one of {', '.join(DURABILITIES)}: what a "
                "saved record outlives, the death of its process or a power loss, too."
            )
        if settings.compression not in COMPRESSIONS:
            raise ConfigurationError(
                f"compression is {settings.compression!r}; expected None, or 'zstd' for "
                "predictions.jsonl.zst."
            )
        if settings.compression and importlib.util.find_spec("zstandard") is None:
            raise ConfigurationError(
                "compression is 'zstd', and the package zstandard is not installed. Install agl_meta[zstd], "
                "or leave compression out."
            )
        return settings
