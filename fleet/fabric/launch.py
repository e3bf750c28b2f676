"""Lets the first node of a group start programs on the other nodes by ssh.

For this time each other node runs an sshd of its own with new keys, so that the nodes need no keys for each other. Nothing of
it stays on a node. ``@FILES@`` stands for the folder in which the node puts the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import frozen
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from fleet.fabric.ends import End

FILES = "@FILES@"

SSH = f"ssh -F {FILES}/ssh_config"
"""The command by which the first node starts a program on another."""

SSHD = "/usr/sbin/sshd"
"""The whole path, since sshd executes itself again for each connection."""


def daemon() -> tuple[str, ...]:
    """The command that runs sshd on another node."""
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
    """The keys of a group: the first node logs in with ``login``, and the sshds of the others have ``host``."""

    login: Key
    host: Key

    @classmethod
    def make(cls) -> Keys:
        """Make new ones."""
        return cls(Key.make(), Key.make())


def files_of_first(keys: Keys, others: Sequence[tuple[End, int]]) -> Mapping[str, str]:
    """The contents of the first node's files, by name. ``others``: the other ends, with the ports of their sshds."""
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
    """The contents of another node's files, by name."""
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
        # PAM sets the limits of a session, which jobs have, too.
        "UsePAM yes\n",
    }
