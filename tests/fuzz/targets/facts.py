"""A node's answers over SSH: the facts of the deploy."""

import pkgutil
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any

from pyinfra.api.exceptions import DeployError, FactProcessError
from pyinfra.api.facts import FactBase as AnyFact

import tasks
from agent.report.records import Report, report_to_json
from tasks.common.facts import FactBase
from tests.fuzz.targets import chosen

for _module in pkgutil.walk_packages(tasks.__path__, "tasks."):
    import_module(_module.name)


def facts() -> list[type[Any]]:
    """The facts of the tasks, by name."""
    classes = set[type[Any]]()
    left: list[type[Any]] = [AnyFact]
    while left:
        for kind in left.pop().__subclasses__():
            left.append(kind)
            if kind.__module__.startswith("tasks.") and kind is not FactBase:
                classes.add(kind)
    return sorted(classes, key=lambda kind: (kind.__module__, kind.__name__))


FACTS = facts()


def check(data: bytes) -> None:
    """Read the answer to one fact. Such an answer may be refused, which fails this node alone."""
    if data:
        with suppress(FactProcessError, DeployError):
            FACTS[data[0] % len(FACTS)]().process(data[1:].decode(errors="replace").splitlines())


def seeds() -> Sequence[bytes]:
    """Lines of the form that many facts have, for each fact."""
    report = report_to_json(Report("n1", "h", "boot", "0.1", True, True, uptime=1.0))
    lines = (
        "current 0.1.0-a\nstaged 0.1.0-a",
        "ActiveState=active\nUnitFileState=enabled\nNeedDaemonReload=no",
        f"boot 12.5\n{report}",
        'inspection\n{"functions": [], "other_rdma": [], "rdma_cm": false}',
        '0.1.0-a\n{"changes": [], "errors": []}\n\n0',
        "brought eyJpYXQiOiAxLCAiZXhwIjogMn0\nrenewed bm8\nkept yes",
        "1 2 3\n/etc/a 644 root",
    )
    return [chosen(at, text.encode()) for at in range(len(FACTS)) for text in lines]
