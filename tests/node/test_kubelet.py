"""The kubelet's gate: systemd has loaded it, and the running kubelet has passed it."""

import pytest

from tests.node.evidence import Finding, Node, equal, judge

pytestmark = pytest.mark.kubelet

# Where the deploy puts it (tasks/kubernetes/kubelet.py).
GATES = "ls /etc/systemd/system/*.d/20-trackbed-gate.conf 2>/dev/null || true"
PROPERTIES = "ExecStartPre,TimeoutStartUSec,NeedDaemonReload,ActiveState,Wants"
VERIFIED = 'test "$(cat /run/trackbed/first-pass)" = "$(cat /proc/sys/kernel/random/boot_id)" && echo yes || echo no'


def test_the_kubelet_waits_for_the_first_verified_pass(node: Node) -> None:
    findings = []
    for gate in node.run(GATES).split():
        unit = gate.split("/")[-2].removesuffix(".d")
        shown = node.run('systemctl show --property="$2" "$1"', unit, PROPERTIES)
        properties = dict(line.split("=", 1) for line in shown.splitlines())
        waits = properties.get("ExecStartPre", "")
        findings += [
            Finding(unit, "ExecStartPre", "trackbed wait --first-pass", waits, "trackbed wait --first-pass" in waits),
            equal(unit, "TimeoutStartUSec", "infinity", properties["TimeoutStartUSec"]),
            equal(unit, "NeedDaemonReload", "no", properties["NeedDaemonReload"]),
            Finding(
                unit,
                "Wants",
                "trackbed.service",
                properties["Wants"],
                "trackbed.service" in properties["Wants"].split(),
            ),
        ]
        if properties["ActiveState"] == "active" and "--let-go" not in waits:
            findings.append(
                equal(unit, "runs on a node that was verified in this boot", "yes", node.run(VERIFIED).strip())
            )
    judge(node, findings, "its kubelet, if it has one, has no gate")
