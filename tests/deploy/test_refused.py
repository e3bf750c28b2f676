"""Data that the deploy refuses before it touches a node: `refused.txt` has each and its whole message."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api.exceptions import DeployError

from agent.spec.node import NodeSpec
from tasks import fabric, firmware, kubernetes, nccl, node_spec, pull, readiness, reboot_policy
from tasks.common import layers
from tasks.containers import container_engine, container_runtime
from tasks.drivers import erdma, gpu_driver, ofed, peer_memory
from tasks.host import kernel, kernel_modules, limits
from tasks.kubernetes import kubelet, labels, manifests, reporter
from tests.deploy.conftest import DEBIAN, Node, state_of
from tests.deploy.hardware import CONNECTX, has
from tests.deploy.host import test_boot
from tests.deploy.pinned import assert_pinned

ROOT = Path(__file__).parents[2]
FILE = Path(__file__).with_name("refused.txt")


TASKS: dict[str, Callable[[], object]] = {
    "boot": test_boot.configure,
    "container_engine": container_engine.install,
    "container_runtime": container_runtime.configure,
    "device_plugins": manifests.render,
    "erdma": erdma.install,
    fabric.FABRIC.name: fabric.FABRIC.here,
    fabric.FLOORS.name: fabric.FLOORS.here,
    "firmware": firmware.configure,
    "gpu_driver": gpu_driver.install,
    "kernel": kernel.pin,
    "kernel_module_options": kernel_modules.set_options,
    "kernel_modules": kernel_modules.configure,
    "kubelet": kubelet.gate,
    "kubernetes": lambda: kubernetes.configure(spec=NodeSpec("node-a")),
    "labels": labels.publish,
    "limits": limits.lift,
    "nccl": nccl.configure,
    "ofed": ofed.install,
    "peer_memory": peer_memory.configure,
    "pull": pull.serve,
    "ready_timeout": partial(readiness.wait, version="1-a", spec_hash="abc"),
    "reboot": reboot_policy.by_policy,
    "reporter_listen": partial(reporter.serve, version="1-a"),
}
"""The task of each key; other keys are those of the spec and of pyinfra."""


def message(node: Node, data: dict[str, Any]) -> str:
    node.data, task = data, TASKS.get(next(iter(data)))
    with pytest.raises(DeployError) as refused:
        if task is None:
            host = state_of([("gpu-01", data)]).inventory.get_host("gpu-01")
            if faults := layers.merge(host):
                raise DeployError("\n".join(faults))
            node_spec.node_spec(host.data.dict(), "gpu-01")  # type: ignore[no-untyped-call]
        else:
            node.deploy(task, {**DEBIAN, **has(CONNECTX), **test_boot.GRUB})
    return str(refused.value).replace("\n", "\n    ").replace(f"{ROOT}/", "")


def test_bad_data_is_refused_with_the_host_the_key_and_the_remedy(node: Node) -> None:
    made = []
    for line in FILE.read_text().splitlines():
        if not line.startswith("    "):
            made.append(line)
        if line.startswith("{"):
            made.append(f"    {message(node, json.loads(line))}")
    assert_pinned(FILE, "\n".join(made) + "\n")
