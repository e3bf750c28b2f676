"""A plugin of pytest for `make mutants`: each test of the supervisor counts for each of its functions.

mutmut runs for a mutant the tests that were seen to call its function, and sees that only in its own process. These tests run
the supervisor in another one.
"""

from importlib import import_module

import pytest
from mutmut.state import state

SUPERVISOR = "agent.service.supervisor"
ORIGINAL = "__mutmut_orig"
"""What mutmut puts behind the name of a function that it has copied."""


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.path.name == "test_supervisor.py":
        state()._stats |= functions()


def functions() -> set[str]:
    """The supervisor's functions, as mutmut calls them."""
    module = import_module(SUPERVISOR)
    scopes = [module, *(value for value in vars(module).values() if isinstance(value, type))]
    names = {name for scope in scopes for name in vars(scope) if name.endswith(ORIGINAL)}
    return {f"{SUPERVISOR}.{name.removesuffix(ORIGINAL)}" for name in names}
