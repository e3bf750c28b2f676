"""Tries mutmut's mutants: `python -m bench.try_mutants`. With modules, only theirs, and those that have survived again.

`mutmut run` starts pytest for each mutant. Here pytest collects a module's tests once, and each mutant is tried in a fork of
that process, first by the tests that have noticed others of the same function. The results stand where mutmut has its own:
`mutmut results` and `mutmut show` print them. A mutant is tried again if its function has changed.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from _pytest.runner import runtestprotocol
from attrs import define, field
from mutmut.__main__ import create_mutants, store_lines_covered_by_tests
from mutmut.configuration import config
from mutmut.mutation.data import SourceFileMutationData
from mutmut.mutation.trampoline import set_mutant_under_test
from mutmut.state import state
from mutmut.utils.file_utils import copy_also_copy_files, copy_src_dir, setup_source_paths
from mutmut.utils.format_utils import mangled_name_from_mutant_name as function_of

from tests.mutants import OF_ITS_OWN, SUBJECTS, functions

ROOT = Path(__file__).parent.parent
MUTANTS = ROOT / "mutants"

# What mutmut calls these results.
SURVIVED, KILLED, TIMEOUT, NO_TESTS = 0, 1, -24, 33

SLACK = 15.0
"""Seconds that a mutant's tests may take beside three times what they took without it. Waits for a CPU do not count."""

ARGUMENTS = ("--rootdir=.", "-q", "-p", "tests.mutants", "-p", "no:cacheprovider", "-p", "no:xdist")


@define
class Trial:
    """A plugin of pytest that tries one module's mutants in place of running the tests.

    ``again``: the results of mutants that are tried; None: no result yet. ``reached``: the tests that call a function.
    ``took``: the seconds of each test. ``noticed``: how many mutants of a function a test has noticed.
    """

    module: str
    results: SourceFileMutationData
    again: frozenset[int | None]
    reached: dict[str, set[str]] = field(factory=lambda: defaultdict(set), init=False)
    took: dict[str, float] = field(factory=dict, init=False)
    noticed: Counter[tuple[str, str]] = field(factory=Counter, init=False)

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Run each test once without a mutant, to see what it calls; then try the mutants, those with quick tests first."""
        items = {item.nodeid: item for item in session.items}
        set_mutant_under_test("stats")
        for item in items.values():
            self._look_at(item)
        self._try_none(session.items)
        codes = self.results.exit_code_by_key
        chosen = [mutant for mutant, code in codes.items() if code in self.again]
        for mutant in sorted(chosen, key=lambda each: self._seconds(self.reached[function_of(each)])):
            codes[mutant] = self._try(mutant, items)
            self.results.save()
        # If the tests fail without a mutant now, they may have failed with the mutants for the same reason: no result counts.
        self._try_none(session.items)
        print(f"{self.module}: {Counter(codes.values())[SURVIVED]} of {len(codes)} survived")  # noqa: T201
        return True

    def _try_none(self, items: Sequence[pytest.Item]) -> None:
        code, last = _in_a_fork("", items, SLACK + 3 * sum(self.took.values()))
        if code != SURVIVED:
            sys.exit(f"{last} fails in a fork without a mutant")

    def _seconds(self, tests: set[str]) -> float:
        return sum(self.took[test] for test in tests)

    def _look_at(self, item: pytest.Item) -> None:
        state()._stats.clear()
        began = time.monotonic() - _waited_for_a_cpu(os.getpid())
        if _fails(item):
            sys.exit(f"{item.nodeid} fails without a mutant")
        self.took[item.nodeid] = time.monotonic() - _waited_for_a_cpu(os.getpid()) - began
        outside = self.module in OF_ITS_OWN.get(item.path.name, ())
        for name in functions(self.module) if outside else state()._stats:
            self.reached[name].add(item.nodeid)

    def _try(self, mutant: str, items: dict[str, pytest.Item]) -> int:
        function = function_of(mutant)
        tests = sorted(self.reached[function], key=lambda test: (-self.noticed[function, test], self.took[test]))
        if not tests:
            return NO_TESTS
        code, last = _in_a_fork(mutant, [items[test] for test in tests], SLACK + 3 * self._seconds(set(tests)))
        if code == SURVIVED:
            print(f"survived: {mutant}", flush=True)  # noqa: T201
        else:
            self.noticed[function, last] += 1
        return code


def _fails(item: pytest.Item) -> bool:
    return any(report.failed for report in runtestprotocol(item, nextitem=None, log=False))


def _in_a_fork(mutant: str, items: Sequence[pytest.Item], limit: float) -> tuple[int, str]:
    """Run tests with a mutant, until one fails. :returns: the result, and the name of the last test."""
    reader, writer = os.pipe()
    began, child = time.monotonic(), os.fork()
    if child == 0:
        _run(mutant, items, writer)
    os.close(writer)
    code = None
    try:
        while code is None:
            ended, status = os.waitpid(child, os.WNOHANG)
            spent = time.monotonic() - began
            if ended:
                code = KILLED if status else SURVIVED
            elif spent - _waited_for_a_cpu(child) > limit:
                code = TIMEOUT
            else:
                time.sleep(min(0.01 + spent / 10, 0.2))
    finally:
        _end(child)
    with os.fdopen(reader) as begun:
        return code, begun.read().rstrip("\n").rpartition("\n")[2]


def _run(mutant: str, items: Sequence[pytest.Item], writer: int) -> None:
    """Run the tests, and end this process. Each test's name is written before it begins."""
    status = 1
    try:
        os.setpgid(0, 0)
        set_mutant_under_test(mutant)
        nowhere = os.open(os.devnull, os.O_RDWR)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        for item in items:
            os.write(writer, f"{item.nodeid}\n".encode())
            if _fails(item):
                break
        else:
            status = 0
    finally:
        os._exit(status)


def _end(child: int) -> None:
    """Kill what is left of a child and of the processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(child, 0)


def _waited_for_a_cpu(process: int) -> float:
    """Seconds that the threads of a process, and its children, have waited for a CPU: those of the one that waited longest."""
    folder = Path(f"/proc/{process}/task")
    try:
        waited = [int((task / "schedstat").read_text().split()[1]) / 1e9 for task in folder.iterdir()]
        children = (folder / str(process) / "children").read_text().split()
    except OSError:
        return 0.0  # it has ended
    return max([*waited, *(_waited_for_a_cpu(int(child)) for child in children)])


def _try_module(module: str, again: frozenset[int | None]) -> int:
    results = SourceFileMutationData(path=Path(module.replace(".", "/")).with_suffix(".py"))
    results.load()
    results.meta_path = results.meta_path.absolute()
    os.chdir(MUTANTS)
    # Not tests/cluster, where a file has the same name as one of these: a killed mutant would leave its control plane running.
    folders = map(Path, config().pytest_add_cli_args_test_selection)
    paths = sorted(path for folder in folders for path in folder.rglob("test_*.py"))
    files = [str(path) for path in paths if module in SUBJECTS.get(path.name, ())]
    return pytest.main([*ARGUMENTS, *files], plugins=[Trial(module, results, again)])


def main() -> None:
    """Make the mutants, and try those of the modules one after the other, each in a process of its own."""
    os.chdir(ROOT)
    set_mutant_under_test("mutant_generation")
    MUTANTS.mkdir(exist_ok=True)
    copy_src_dir()
    copy_also_copy_files()
    store_lines_covered_by_tests()
    create_mutants(1)
    setup_source_paths()
    os.environ["PY_IGNORE_IMPORTMISMATCH"] = "1"
    again = frozenset({None, SURVIVED, NO_TESTS}) if sys.argv[1:] else frozenset({None})
    broken = []
    for module in sys.argv[1:] or [path.removesuffix(".py").replace("/", ".") for path in config().only_mutate]:
        child = os.fork()
        if child == 0:
            os._exit(_try_module(module, again))
        _, status = os.waitpid(child, 0)
        if status:
            broken.append(module)
    if broken:
        sys.exit(f"not tried to the end: {', '.join(broken)}")


if __name__ == "__main__":
    main()
