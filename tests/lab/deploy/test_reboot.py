"""Reboots by policy: a request leads to one reboot, and the deploy continues. A request that stays leads to no other one."""

import pytest

from lab import Node
from tests.boots import boot_id
from tests.lab.conftest import changed, inventory_data, pyinfra, ready, refusal, said, succeeded

pytestmark = pytest.mark.campaign

REQUESTS = "/var/lib/trackbed/reboots"
REASON = "kernel arguments quiet are still in effect"
# A node that boots is slow.
REBOOT = inventory_data({"reboot": {"policy": "allow", "timeout": 900}, "ready_timeout": 900})


def booted(node: Node) -> float:
    """When its kernel started, in seconds since the epoch."""
    now, up = node.sh("date +%s; cut -d' ' -f1 /proc/uptime").split()
    return float(now) - float(up)


def request(node: Node) -> None:
    """Request what the task boot withdraws after a reboot."""
    node.sh(f"mkdir -p {REQUESTS}; (echo {boot_id(node)}; echo {REASON}) > {REQUESTS}/boot-former")


def test_a_reboot_request_is_announced_and_by_default_nothing_is_rebooted(node: Node) -> None:
    before = boot_id(node)
    request(node)
    done = succeeded(pyinfra("-y", "--limit", "node1", "inventories/lab.py", "deploy.py"))
    assert f"reboot wanted: boot-former: {REASON}; the host is not rebooted" in said(done)
    assert boot_id(node) == before


def test_hosts_reboot_one_after_the_other_and_the_deploy_goes_on(nodes: tuple[Node, ...]) -> None:
    before = [boot_id(node) for node in nodes]
    for node in nodes:
        request(node)
    succeeded(pyinfra("-y", "inventories/lab.py", "deploy.py", *REBOOT))
    assert all(boot_id(node) != was for node, was in zip(nodes, before, strict=True))
    assert all(ready(node) for node in nodes)
    assert all(node.sh(f"ls {REQUESTS}") == "" for node in nodes)
    # pyinfra's order of hosts is none. Of the two, one still ran when the other was back.
    first, second = sorted(nodes, key=booted)
    back = first.sh("systemctl show --timestamp=unix -P ActiveEnterTimestamp multi-user.target")
    assert booted(second) > float(back.strip().removeprefix("@"))
    again = pyinfra("-y", "--json", "inventories/lab.py", "deploy.py", *REBOOT)
    assert changed(again, ("node1", "node2")) == []


def test_a_request_that_a_reboot_does_not_satisfy_fails_and_reboots_nothing_more(nodes: tuple[Node, ...]) -> None:
    before = [boot_id(node) for node in nodes]
    # grub's tool is there, its menu is written; but QEMU gives these nodes their kernel, and its arguments.
    for node in nodes:
        node.sh("printf '#!/bin/sh\\n' > /usr/local/sbin/update-grub; chmod +x /usr/local/sbin/update-grub")
    words = (
        "-y",
        "inventories/lab.py",
        "deploy.py",
        *REBOOT,
        *inventory_data({"boot": {"arguments": ["trackbed.test=1"]}}),
    )
    refused = refusal(pyinfra(*words))
    unmet = "boot: kernel arguments trackbed.test=1 are not in effect: this is still so after a reboot"
    assert unmet in refused
    # The one that came first is the canary of the other.
    (canary,) = (node for node, was in zip(nodes, before, strict=True) if boot_id(node) != was)
    assert f"deferred: reboot: reboots in its group failed: {canary.name}" in refused
    after = boot_id(canary)
    assert unmet in refusal(pyinfra(*words, "--limit", canary.name))
    assert boot_id(canary) == after
