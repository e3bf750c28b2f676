"""Netdevs of other network namespaces on top of one of the own, on this machine's own kernel."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from agent.linux.netlink import LinuxNetlink
from tests.private_namespace import check_in_namespace

MADE = "ip link add fab0 type veth peer name fab1; ip link add fab2 type veth peer name fab3"


@contextmanager
def pod() -> Iterator[str]:
    """A process in a network namespace below the present one, by its number."""
    command = ["unshare", "--net", "sh", "-c", "echo made && exec sleep 60"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == b"made\n"
        yield str(process.pid)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def ip(*words: str, of: str = "") -> None:
    subprocess.run([*(["nsenter", "-t", of, "-n"] if of else []), "ip", *words], check=True)


def test_a_macvlan_that_was_moved_away_or_made_there_is_found_and_the_ends_of_pairs_are_not() -> None:
    def check() -> None:
        netlink = LinuxNetlink()
        assert netlink.uppers_elsewhere() == {}
        with pod() as one, pod() as other:
            ip("link", "add", "net1", "link", "fab0", "netns", one, "type", "macvlan", "mode", "bridge")
            ip("link", "set", "fab3", "netns", one)
            ip("link", "add", "net2", "link", "fab0", "type", "macvlan", "mode", "bridge")
            ip("link", "set", "net2", "netns", other)
            # A netdev that is on top of one of the pod's own.
            ip("link", "add", "net3", "link", "fab3", "type", "macvlan", "mode", "bridge", of=one)
            below = next(link.ifindex for link in netlink.links() if link.name == "fab0")
            assert netlink.uppers_elsewhere() == {below: ("net1", "net2")}
            assert not [name for name in os.listdir("/mnt/class/net/fab0") if name.startswith("upper_")]  # noqa: PTH208
            ip("link", "delete", "net2", of=other)
            assert netlink.uppers_elsewhere() == {below: ("net1",)}

    check_in_namespace(f"{MADE}; mount -t sysfs sysfs /mnt", check, within=60)


def test_a_pair_whose_end_is_in_a_namespace_of_a_namespace_is_not_taken_for_an_upper() -> None:
    def check() -> None:
        with pod() as one, pod() as other:
            ip("link", "set", "fab3", "netns", one)
            ip("link", "add", "in0", "type", "veth", "peer", "name", "in1", of=one)
            ip("link", "set", "in1", "netns", other, of=one)
            ip("link", "add", "mv0", "link", "in0", "type", "macvlan", of=one)
            ip("link", "set", "mv0", "netns", other, of=one)
            assert LinuxNetlink().uppers_elsewhere() == {}

    check_in_namespace(MADE, check, within=60)
