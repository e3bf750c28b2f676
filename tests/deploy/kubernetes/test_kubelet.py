"""The gate of the kubelet: what is written, and on which nodes it would hold nothing."""

from pathlib import Path
from typing import Any

import pytest

from tasks.common import texts
from tasks.common.units import DropIns
from tasks.kubernetes import kubelet
from tests.deploy.conftest import Answers, Node, file_lines, of
from tests.deploy.scripts import sh
from tests.stand_ins import program, text_file

DROP_IN = "/etc/systemd/system/kubelet.service.d/20-trackbed-gate.conf"
K3S = "/etc/systemd/system/k3s-agent.service.d/20-trackbed-gate.conf"
NEW = "/etc/systemd/system/kubelet.service.d/.20-trackbed-gate.conf.new"
READS = f"systemctl daemon-reload\n{texts._READ_NOW}"
HOLD = "ExecStartPre=/usr/local/bin/trackbed wait --first-pass --joined /etc/kubernetes/kubelet.conf"


def has(*paths: str) -> Answers:
    return {of(DropIns): file_lines(dict.fromkeys(paths, "another text"))}


def gate(node: Node, answers: Answers, **data: Any) -> tuple[list[str], str]:
    """The commands, and what is written."""
    node.data = data
    result = node.deploy(kubelet.gate, answers)
    assert not result.failed
    return result.flat, "".join(text.decode() for text in result.uploads.values())


def test_the_kubelet_is_held_and_not_restarted(node: Node) -> None:
    commands, text = gate(node, has(), kubelet={"policy": "hold"})
    assert commands[-2] == f"upload {NEW}"
    assert commands[-1].endswith(f"{READS}' sh put {DROP_IN} --")
    assert text.splitlines()[-1] == HOLD
    assert {"Wants=trackbed.service", "TimeoutStartSec=infinity"} <= set(text.splitlines())
    # Any of these would carry a restart of the agent over to the kubelet.
    assert not any(word in text for word in ("Requires=", "BindsTo=", "PartOf=", "Upholds="))


def test_a_second_run_changes_nothing(node: Node) -> None:
    wanted = kubelet.Kubelet("hold")
    assert gate(node, {of(DropIns): file_lines({DROP_IN: wanted.text})}, kubelet={"policy": "hold"}) == ([], "")


@pytest.mark.parametrize(
    ("given", "option"),
    [({"policy": "hold", "deadline": 600}, " --let-go 600"), ({"policy": "start-tainted"}, " --let-go 0")],
)
def test_where_a_reporter_publishes_the_kubelet_may_start_unverified(
    node: Node, given: dict[str, Any], option: str
) -> None:
    publishes = {"server": "https://api.example.net:6443", "ca_file": "ca.pem"}
    _, text = gate(node, has(), kubelet=given, kubernetes=publishes)
    assert text.splitlines()[-1] == HOLD + option


def test_another_distributions_gate_is_removed(node: Node) -> None:
    commands, text = gate(node, has(DROP_IN), kubelet={"policy": "hold", "distribution": "k3s"})
    assert commands[-1].endswith(f"{READS}' sh put {K3S} remove {DROP_IN} --")
    assert "--joined /var/lib/rancher/k3s/agent/kubelet.kubeconfig" in text


def test_without_the_key_the_gate_is_removed(node: Node) -> None:
    assert gate(node, has()) == ([], "")
    (command,) = gate(node, has(DROP_IN))[0]
    assert command.endswith(f"{READS}' sh remove {DROP_IN} --")


def test_a_managed_clusters_own_paths(node: Node) -> None:
    given = {"policy": "hold", "unit": "kubelet-own.service", "kubeconfig": "/var/lib/kubelet/kubeconfig"}
    commands, text = gate(node, has(), kubelet=given)
    assert commands[-1].endswith(f"put {DROP_IN.replace('kubelet.service', 'kubelet-own.service')} --")
    assert text.endswith("--joined /var/lib/kubelet/kubeconfig\n")


RKE2 = {"distribution": "rke2"}


@pytest.mark.parametrize(
    ("given", "active", "process", "config", "fault"),
    [
        pytest.param(RKE2, "rke2-agent", "", "data-dir: /mnt", "kubeconfig /mnt/agent/kubelet.kubeconfig", id="rke2-535"),
        pytest.param({}, "k0sworker", "", "", "unit k0sworker.service", id="k0sctl-533"),
        pytest.param(
            {}, "kubelet", "--v 2 --kubeconfig /var/lib/kubelet/kubeconfig", "",
            "kubeconfig /var/lib/kubelet/kubeconfig", id="peirates-60",
        ),
        (RKE2, "rke2-server", "", "", "unit rke2-server.service"),
        (RKE2, "rke2-agent", "--kubeconfig=/var/lib/rancher/rke2/agent/kubelet.kubeconfig", "token: x", ""),
        ({}, "kubelet", "--bootstrap-kubeconfig=/a --kubeconfig=/etc/kubernetes/kubelet.conf", "", ""),
        ({}, "", "", "", ""),
    ],
)  # fmt: skip
def test_a_gate_that_would_hold_nothing_is_refused(
    tmp_path: Path, node: Node, given: dict[str, str], active: str, process: str, config: str, fault: str
) -> None:
    program(tmp_path / "bin/systemctl", f'[ "$3" = "{active}.service" ]')
    program(tmp_path / "bin/pgrep", "echo 7" if process else "exit 1")
    text_file(tmp_path / "proc/7/cmdline", "\0".join(["kubelet", *process.split()]) + "\0")
    text_file(tmp_path / "etc/rancher/rke2/config.yaml", f"{config}\n")
    wanted = kubelet.Kubelet("hold", **given)  # type: ignore[arg-type]
    others = [each for each in kubelet.OTHERS if each != wanted.gated]
    found = sh(kubelet._TARGET, tmp_path, wanted.gated, wanted.joined, *others, programs=tmp_path / "bin")
    assert found == [fault] * bool(fault)
    result = node.deploy(kubelet.gate, {**has(), of(kubelet.GateFaults): found}, kubelet={"policy": "hold", **given})
    assert result.failed is bool(fault)
    key, _, value = fault.partition(" ")
    assert not fault or f"give kubelet.{key} '{value}'" in result.errors[0]
