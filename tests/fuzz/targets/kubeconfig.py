"""The kubeconfig of the control host, which the operator or another program wrote."""

import json
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightkube.core.exceptions import ConfigError

from fleet.connection import connect
from fleet.kubeconfig import from_kubeconfig

EXEC = {"apiVersion": "v1", "command": "/bin/true", "args": ["a"], "env": [{"name": "A", "value": "b"}]}
USERS: tuple[dict[str, Any], ...] = (
    {"token": "t", "username": "a", "password": "b"},
    {"tokenFile": "/etc/hostname", "as": "w"},
    {"exec": EXEC},
    {"client-certificate-data": "eA==", "client-key-data": "eA=="},
    {"client-certificate": "/etc/hostname", "client-key": "/etc/hostname", "auth-provider": {"name": "x"}},
)
CLUSTER = {"server": "https://127.0.0.1:1", "insecure-skip-tls-verify": True, "certificate-authority-data": "eA=="}


def check(data: bytes) -> None:
    """Read a kubeconfig, and make a client of it."""
    with tempfile.TemporaryDirectory(prefix="trackbed-fuzz-kubeconfig-") as name:
        file = Path(name) / "kubeconfig"
        file.write_bytes(data)
        with suppress(ConfigError), connect(from_kubeconfig(file)):
            pass


def seeds() -> Sequence[bytes]:
    """One for each form of credentials."""
    common: dict[str, Any] = {
        "clusters": [{"name": "c", "cluster": CLUSTER}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": "n"}}],
        "current-context": "x",
    }
    return [json.dumps({**common, "users": [{"name": "u", "user": user}]}).encode() for user in USERS]
