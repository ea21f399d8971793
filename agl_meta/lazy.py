"""Names of a package that are imported when they are first used (PEP 562), so that importing it is light."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def loaded_on_use(package: str, modules: Mapping[str, str]) -> Callable[[str], Any]:
    """The ``__getattr__`` of a package, for a mapping from names to the modules that define them.

    It raises :class:`ImportError` that says what to install where a name needs what is not there.
    """

    def get_attribute(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        try:
            value = getattr(import_module(modules[name]), name)
        except ModuleNotFoundError as error:
            missing = str(error.name).partition(".")[0]
            raise ImportError(
                f"{package}.{name} needs {missing}, which is not installed. Install a set that works "
                "together: pip install 'agl_meta[verl]'."
            ) from error
        setattr(sys.modules[package], name, value)
        return value

    return get_attribute
