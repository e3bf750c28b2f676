"""How a node of a group starts programs on the others: each has an sshd of its own for that time, with keys for it alone.

Nodes need no keys for each other, and none are left. ``@FILES@`` stands for the folder in which the node puts the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from fleet.fabric.ends import End

FILES = "@FILES@"

SSH = f"ssh -F {FILES}/ssh_config"
"""The command of the first node."""

SSHD = "/usr/sbin/sshd"
"""sshd starts itself again, and so must be given by its path."""


def daemon() -> tuple[str, ...]:
    """The command of the others."""
    return SSHD, "-D", "-e", "-f", f"{FILES}/sshd_config"


@frozen
class Key:
    """A key pair in OpenSSH's formats."""

    private: str
    public: str

    @classmethod
    def make(cls) -> Key:
        """Make a new one."""
        made = Ed25519PrivateKey.generate()
        return cls(
            made.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()).decode(),
            made.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode(),
        )


@frozen
class Keys:
    """Those of a group: the first node logs in with one, the others' sshds prove themselves with the other."""

    login: Key
    host: Key

    @classmethod
    def make(cls) -> Keys:
        """Make new ones."""
        return cls(Key.make(), Key.make())


def files_of_first(keys: Keys, others: Sequence[tuple[End, int]]) -> Mapping[str, str]:
    """The files of the first node: by name, their content. ``others``: the other ends, with the ports of their sshds."""
    ports = "".join(f"Host {end.address}\n  Port {port}\n" for end, port in others)
    return {
        "login": keys.login.private,
        "known_hosts": "".join(f"[{end.address}]:{port} {keys.host.public}\n" for end, port in others),
        "ssh_config": f"{ports}Host *\n"
        "  User root\n"
        f"  IdentityFile {FILES}/login\n"
        "  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {FILES}/known_hosts\n"
        "  GlobalKnownHostsFile /dev/null\n"
        "  StrictHostKeyChecking yes\n"
        "  BatchMode yes\n"
        "  ConnectTimeout 20\n",
    }


def files_of_other(keys: Keys, first: End, end: End, port: int) -> Mapping[str, str]:
    """The files of another node: by name, their content."""
    return {
        "host_key": keys.host.private,
        "authorized_keys": f'restrict,from="{first.address}" {keys.login.public}\n',
        "sshd_config": f"Port {port}\n"
        f"ListenAddress {end.address}\n"
        f"HostKey {FILES}/host_key\n"
        f"AuthorizedKeysFile {FILES}/authorized_keys\n"
        "PidFile none\n"
        "AllowUsers root\n"
        "PermitRootLogin prohibit-password\n"
        "PasswordAuthentication no\n"
        "KbdInteractiveAuthentication no\n"
        # The limits of a session are what jobs get.
        "UsePAM yes\n",
    }
