"""Which versions of the host are supported: data, and the check that uses it."""

from __future__ import annotations

from importlib import metadata

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from agl_meta.errors import ConfigurationError

SUPPORTED = {
    # 0.2.x has no trainer_cls/daemon_cls; 1.x has another enqueue path; 0.1.x shows an agent no
    # metadata at all.
    "agentlightning": SpecifierSet(">=0.3.0,<0.4"),
    # Ran with agentlightning 0.3.0: 0.5.0, 0.6.x, 0.7.0. 0.7.1 fails upstream (num_examine), 0.8.0
    # has no fsdp_workers, 0.9.1 moved create_rl_sampler.
    "verl": SpecifierSet(">=0.5.0,<0.7.1"),
}

_REPORTED = ("agl_meta", "agentlightning", "verl", "torch", "ray")


def check_versions() -> None:
    """Raise :class:`ConfigurationError` unless the installed host is one that works."""
    for package, supported in SUPPORTED.items():
        found = installed_version(package)
        if found is None or not supported.contains(Version(found), prereleases=True):
            raise ConfigurationError(
                f"Found {package} {found or '(not installed)'}; this agl_meta works with {package} "
                f"{supported}. Install a set that works together: pip install 'agl_meta[verl]'."
            )


def installed_version(package: str) -> str | None:
    """The version of a distribution, or ``None`` if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def installed_versions() -> dict[str, str | None]:
    """Versions for the record: what a reader needs to know about how a pass came to be."""
    return {package: installed_version(package) for package in _REPORTED}
