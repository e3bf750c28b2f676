"""Makes a Debian look like Ubuntu 22.04: netplan configures the management card, and unattended-upgrades uses apt by itself.

Debian packages both programs. Ubuntu uses Debian's names of packages, except for kernels. The kernel and systemd are
Debian's, and there is no snap.
"""

from pathlib import Path

from lab.debian import Debian
from lab.lookalikes.lookalike import Lookalike

OS_RELEASE = """\
PRETTY_NAME="Ubuntu 22.04.4 LTS"
NAME="Ubuntu"
VERSION_ID="22.04"
VERSION="22.04.4 LTS (Jammy Jellyfish)"
VERSION_CODENAME=jammy
ID=ubuntu
ID_LIKE=debian
UBUNTU_CODENAME=jammy
"""
# The same as the file of systemd-networkd that it replaces.
NETPLAN = """\
network:
  version: 2
  renderer: networkd
  ethernets:
    management:
      match: {driver: virtio_net}
      dhcp4: true
      dhcp4-overrides: {use-hostname: false}
      link-local: []
      accept-ra: false
"""


def disguise(root: Path, _release: str, _debian: Debian, _log: Path) -> None:
    """Change the root file system."""
    (root / "usr/lib/os-release").write_text(OS_RELEASE)
    (root / "etc/systemd/network/10-management.network").unlink()
    netplan = root / "etc/netplan/50-lab.yaml"
    netplan.parent.mkdir(exist_ok=True)
    netplan.write_text(NETPLAN)
    netplan.chmod(0o600)


UBUNTU_22_04 = Lookalike("ubuntu-22.04", packages=("netplan.io", "unattended-upgrades"), lacks=(), disguise=disguise)
