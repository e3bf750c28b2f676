"""A task whose key the inventory does not have."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tasks.containers import container_engine, container_runtime
from tasks.drivers import erdma, gpu_driver, ofed, peer_memory
from tasks.host import kernel
from tasks.kubernetes import manifests
from tests.deploy.conftest import DEBIAN, Node

TASKS = [
    *(kernel.pin, ofed.install, erdma.install, gpu_driver.install, peer_memory.configure),
    *(container_engine.install, container_runtime.configure, manifests.render),
]


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__module__)
def test_without_its_key_a_task_does_nothing(node: Node, task: Callable[[], object]) -> None:
    assert node.deploy(task, DEBIAN).planned == {}
