"""Every error and warning of agl_meta; all errors share one base class.

A message says what was found, what was expected and what to do, in that order (after coverage.py's
``exceptions.py``: one base, so that a caller can catch the whole library).
"""

from __future__ import annotations


class AglMetaError(Exception):
    """Base of every error that agl_meta raises."""


class ConfigurationError(AglMetaError):
    """A set-up that can't work, refused before training starts."""


class OutputDirError(ConfigurationError):
    """An output folder that is missing where it is needed, or can't be used."""


class StampError(AglMetaError):
    """Task metadata that agl_meta can't accept: of an unknown schema version, damaged, or leading
    out of the output folder."""


class NotInRolloutError(AglMetaError):
    """The training context was asked for where no rollout is running."""


class RecordError(AglMetaError):
    """A saved record that can't be read; the message names file and line."""


class AglMetaWarning(UserWarning):
    """Base of every warning that agl_meta issues."""


class UnstampedRolloutWarning(AglMetaWarning):
    """A rollout carries no training context, so its numbers are ``None``."""


class DamagedRecordWarning(AglMetaWarning):
    """A reader left out a record or a folder that it could not read; the message names file and line."""
