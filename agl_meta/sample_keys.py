"""Stable names of samples: the same in every evaluation, run and process.

Everything that compares evaluations joins on them; upstream's ``data_id`` is a new uuid each time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson

from agl_meta.encoding import encode

HELPER_FIELDS = frozenset({"data_id", "index", "fake_ids"})
"""Fields that upstream adds to a sample: ``data_id`` by the daemon, the others by ``AgentDataset``."""


_SORTED = orjson.OPT_SORT_KEYS | orjson.OPT_PASSTHROUGH_SUBCLASS


def content_key(sample: Any) -> str:
    """A hash of the sample's content without upstream's own fields, independent of key order."""
    if isinstance(sample, Mapping):
        sample = dict(sample)
        for field in HELPER_FIELDS:
            sample.pop(field, None)
    try:
        content = orjson.dumps(sample, option=_SORTED)
    except TypeError:
        # What orjson can't take is told by the encoder, whose tags are plain JSON again.
        # Whole: samples that differ behind the place of a cut are different ones.
        whole = encode(sample, max_field_bytes=None, max_record_bytes=None)
        content = orjson.dumps(orjson.loads(whole), option=orjson.OPT_SORT_KEYS)
    return hashlib.blake2b(content, digest_size=12).hexdigest()


class SampleNamer:
    """Names the samples of one pass; equal ones are told apart by an occurrence number.

    Args:
        field: name of a field of the samples to use instead of their content.
    """

    def __init__(self, field: str | None = None) -> None:
        self._field = field
        self._seen: dict[str, int] = {}

    def name(self, sample: Any) -> str:
        """The next sample's key. Raises :class:`KeyError` if the sample lacks the field."""
        key = content_key(sample) if self._field is None else str(sample[self._field])
        occurrence = self._seen[key] = self._seen.get(key, 0) + 1
        return key if occurrence == 1 else f"{key}#{occurrence}"
