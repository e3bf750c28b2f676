"""One inventory with hosts of several clusters."""

from pathlib import Path
from typing import Any

import pytest

from tests.deploy.conftest import DEBIAN
from tests.deploy.fake import deployed
from tests.deploy.kubernetes.test_kubernetes import authority

__all__ = ["authority"]

DEPLOY = """
from tasks import kubernetes, node_spec

kubernetes.configure(spec=node_spec.read())
"""
ALONE = "which is of one cluster; give each cluster's hosts theirs, or deploy one cluster at a time (--limit)"


def messages(folder: Path, *options: str, **keys: dict[str, Any]) -> str:
    """The errors of a deploy to hosts with these values of the key `kubernetes`."""
    hosts = {name: {"fake_responses": DEBIAN, "node_name": name, "kubernetes": key} for name, key in keys.items()}
    done = deployed(folder, hosts, DEPLOY, *options, KUBECONFIG="/nowhere/default")
    assert "Traceback" not in done.stderr
    return " ".join(done.stderr.split())


@pytest.mark.parametrize(
    ("kubeconfig", "each"),
    [({}, "no kubeconfig of its own"), ({"kubeconfig": "/nowhere/own"}, "the kubeconfig /nowhere/own")],
)
def test_two_clusters_do_not_share_a_kubeconfig(
    tmp_path: Path, authority: Path, kubeconfig: dict[str, str], each: str
) -> None:
    west = authority.with_name("west.pem")
    west.write_bytes(authority.read_bytes())
    keys = {
        "east": {"server": "https://east:6443", "ca_file": str(authority), **kubeconfig},
        "west": {"server": "https://west:6443", "ca_file": str(west), **kubeconfig},
    }
    said = messages(tmp_path, **keys)
    for one, other in (("east", "west"), ("west", "east")):
        both = f"@fake/{one} is of the cluster https://{one}:6443 and @fake/{other} of https://{other}:6443"
        assert f"{both}, and each has {each}, {ALONE}" in said
    # The deploy of one of them asks the cluster of the kubeconfig.
    alone = messages(tmp_path, "--limit", "@fake/east", **keys)
    assert ALONE not in alone
    assert "kubernetes.kubeconfig: no token for east: " in alone


def test_a_cluster_with_two_addresses_has_one_kubeconfig(tmp_path: Path, authority: Path) -> None:
    keys = {
        "east": {"server": "https://10.0.0.1:6443", "ca_file": str(authority)},
        "west": {"server": "https://10.1.0.1:6443", "ca_file": str(authority)},
    }
    said = messages(tmp_path, **keys)
    assert ALONE not in said
    assert said.count("kubernetes.kubeconfig: no token for ") == 2
