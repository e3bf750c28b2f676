"""The versions of the driver's packages: those that the node has, and those that its repositories have."""

from __future__ import annotations

import re

from pyinfra.context import host

from tasks import packages
from tasks.packages import AvailableVersions, Family

VERSION = re.compile(r"\d{3,4}\.\d+(\.\d+)?")
_NAME = re.compile("nvidia|cuda-drivers|^libcuda|^libnv|^libxnvctrl")
LOCKED = "nvidia"
"""The word in the names of the packages that dnf's lock keeps at the driver's version."""


def missing(names: tuple[str, ...], version: str, family: Family) -> list[str]:
    """For an operation: the packages that are not installed at the version."""
    have = packages.installed(family)
    return [name for name in names if not any(is_at(version, each) for each in have.get(name, ()))]


def others(version: str, family: Family) -> list[str]:
    """For an operation: the driver's installed packages whose version is not the wanted one."""
    return sorted(
        name
        for name, versions in packages.installed(family).items()
        if any(is_drivers(name, each) and not is_at(version, each) for each in versions)
    )


def left(version: str, family: Family) -> list[str]:
    """For an operation: those of the others that the repositories have at the wanted version.

    The rest stay as they are, such as a package with another branch in its name, or one that dnf's lock does not keep at the
    version (libnvsdm): of that, dnf would install the newest one.
    """
    candidates = [name for name in others(version, family) if family == "debian" or LOCKED in name]
    available = host.get_fact(AvailableVersions, names=tuple(candidates), family=family) if candidates else []
    return [name for name in candidates if any(name == each and is_at(version, has) for each, has in available)]


def is_drivers(name: str, package_version: str) -> bool:
    """Whether a package belongs to the driver. The container toolkit's versions have another form."""
    return _NAME.search(name) is not None and VERSION.match(package_version.rpartition(":")[2]) is not None


def is_at(version: str, package_version: str) -> bool:
    """Whether a package's version, without its epoch and its revision, is the driver's."""
    return package_version.rpartition(":")[2].partition("-")[0] == version
