"""A plugin of pytest for `make mutants`: which tests try the mutants of a module.

Each mutant is tried by the tests that were seen to call its function. Nearly every test of the agent calls a part of each of
these modules, and a mutant that survives costs the time of all of them.
"""

from importlib import import_module
from pathlib import Path

import pytest
from mutmut.state import state

SUPERVISOR, WORKER = "agent.service.supervisor", "agent.service.worker"
CONVERGE, ORIGINALS, USERS = "agent.engine.converge", "agent.engine.originals", "agent.engine.users"
INBOX, LOOP, SPEC_IN_FORCE = "agent.service.inbox", "agent.service.loop", "agent.service.spec_in_force"
SERVING = (WORKER, INBOX, LOOP, SPEC_IN_FORCE)
PUBLISH = "agent.reporter.kubernetes.publish"

SUBJECTS: dict[str, tuple[str, ...]] = {
    "test_affected.py": (CONVERGE, USERS),
    "test_checking.py": (SPEC_IN_FORCE,),
    "test_converge.py": (CONVERGE,),
    "test_disruption.py": (CONVERGE, USERS),
    "test_host_originals.py": (ORIGINALS,),
    "test_hung_device.py": ("agent.service.hung_device",),
    "test_incomplete_devices.py": (CONVERGE,),
    "test_interleavings.py": (INBOX, LOOP),
    "test_loop.py": (LOOP,),
    "test_originals.py": (CONVERGE, ORIGINALS),
    "test_originals_file.py": (ORIGINALS,),
    "test_pass.py": (CONVERGE,),
    "test_publisher.py": ("agent.report.publisher",),
    "test_publishing.py": (PUBLISH,),
    "test_publishing_labels.py": (PUBLISH,),
    "test_publishing_turns.py": (PUBLISH,),
    "test_spec_in_force.py": (LOOP, SPEC_IN_FORCE),
    "test_spec_states.py": (SPEC_IN_FORCE,),
    "test_supervisor.py": (SUPERVISOR,),
    "test_supervisor_deadlines.py": (SUPERVISOR,),
    "test_supervisor_messages.py": (SUPERVISOR,),
    "test_supervisor_systemd.py": (SUPERVISOR,),
    "test_unreadable.py": (CONVERGE,),
    "test_users.py": (USERS,),
    "test_wake.py": (INBOX,),
    "test_worker.py": SERVING,
    "test_worker_events.py": SERVING,
    "test_worker_process.py": (WORKER,),
    "test_worker_publishing.py": SERVING,
}
"""Of which modules the mutants are tried with the tests in a file. The others do not run."""

OF_ITS_OWN = {
    "test_checking.py": (SPEC_IN_FORCE,),
    "test_supervisor.py": (SUPERVISOR,),
    "test_supervisor_deadlines.py": (SUPERVISOR,),
    "test_supervisor_messages.py": (SUPERVISOR,),
    "test_supervisor_systemd.py": (SUPERVISOR,),
    "test_worker_process.py": (WORKER,),
}
"""Tests that run a module in a process of its own, in which mutmut sees nothing: all its functions count as called."""

LONG = (
    "test_a_vf_that_does_not_keep_its_carrier_is_set_down_less_and_less_often",
    "test_a_vf_that_gets_a_user_meanwhile_is_not_unbound",
)
"""Tests that take seconds, and do not run. Each would run for every mutant that no other test notices."""

ORIGINAL = "__mutmut_orig"
"""What mutmut puts behind the name of a function that it has copied."""


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.suffix == ".py" and collection_path.name not in SUBJECTS:
        return True
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = [item for item in items if item.originalname in LONG] if items else []  # type: ignore[attr-defined]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if item not in long]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    called, subjects = state()._stats, SUBJECTS[item.path.name]
    for module in OF_ITS_OWN.get(item.path.name, ()):
        called |= functions(module)
    called -= {name for name in called if name.rpartition(".")[0] not in subjects}


def functions(name: str) -> set[str]:
    """A module's functions, as mutmut calls them."""
    module = import_module(name)
    scopes = [module, *(value for value in vars(module).values() if isinstance(value, type))]
    names = {attribute for scope in scopes for attribute in vars(scope) if attribute.endswith(ORIGINAL)}
    return {f"{name}.{attribute.removesuffix(ORIGINAL)}" for attribute in names}
