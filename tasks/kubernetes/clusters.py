"""The cluster of a host. An inventory may have hosts of several clusters."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from attrs import frozen
from pyinfra.api.host import Host
from pyinfra.api.inventory import Inventory


def cluster_of(given: object) -> str:
    """The API server's URL in a host's value of the key `kubernetes`, which names its cluster; empty if there is none."""
    return str(given.get("server", "")) if isinstance(given, Mapping) else ""


@frozen
class Access:
    """How a host's cluster is reached. ``kubeconfig``: empty: the control host's default."""

    server: str
    ca_file: str
    kubeconfig: str

    def excludes(self, other: Access) -> bool:
        """Whether the kubeconfig would be of two clusters. A cluster may have several URLs, but has one authority."""
        return self.kubeconfig == other.kubeconfig and self.server != other.server and self.ca_file != other.ca_file


@cache
def _deployed(inventory: Inventory, key: str) -> list[tuple[Access, str]]:
    """How the clusters of this deploy are reached, each with a host, by the hosts' names."""
    first: dict[Access, str] = {}
    for each in inventory.iter_activated_hosts():
        if isinstance(given := each.data.get(key), Mapping):
            first.setdefault(_access(given), each.name)
    return sorted(first.items(), key=lambda item: item[1])


def shared_kubeconfig(host: Host, key: str) -> str | None:
    """Why the host's kubeconfig may be that of another cluster: a host of this deploy has the same one; None: there is none.

    :param key: the inventory's key with `server`, `ca_file` and `kubeconfig`.
    """
    mine = _access(host.data.get(key))
    for other, name in _deployed(host.state.inventory, key):
        if mine.excludes(other):
            given = f"the kubeconfig {mine.kubeconfig}" if mine.kubeconfig else "no kubeconfig of its own"
            return (
                f"{host.name} is of the cluster {mine.server} and {name} of {other.server}, and each has {given}, "
                "which is of one cluster; give each cluster's hosts theirs, or deploy one cluster at a time (--limit)"
            )
    return None


def _access(given: Mapping[str, object]) -> Access:
    return Access(*(str(given.get(key) or "") for key in ("server", "ca_file", "kubeconfig")))
