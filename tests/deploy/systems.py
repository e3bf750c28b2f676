"""What nodes of several distributions answer: their os-release, and the packages that they have, as NAME or NAME=VERSION."""

from tests.deploy.conftest import Answers


def release(identity: str, version: str, name: str = "") -> Answers:
    lines = (f"ID={identity}", f'NAME="{name or identity}"', f'VERSION_ID="{version}"')
    return {"*-release": ["/etc/os-release", *lines, "---"]}


DEBIAN_13 = release("debian", "13")
UBUNTU = release("ubuntu", "22.04", "Ubuntu")
ROCKY_8 = release("rocky", "8.10", "Rocky Linux")
ALINUX = release("alinux", "3", "Alibaba Cloud Linux")


def dpkg(*packages: str) -> Answers:
    parts = (package.partition("=") for package in packages)
    return {"dpkg -l": [f"ii  {name}:amd64  {version or '1.0-1'}  amd64  something" for name, _, version in parts]}


def rpm(*packages: str) -> Answers:
    parts = (package.partition("=") for package in packages)
    return {"rpm --queryformat": [f"{name} {version or '1.0-1'}" for name, _, version in parts]}
