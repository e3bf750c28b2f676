"""Tries mutmut's mutants: `python -m bench.try_mutants`. With modules, only theirs, and those that have survived again.

`mutmut run` starts pytest for each mutant. Here pytest collects a module's tests once, and each mutant is tried in a fork of
that process, first by the tests that have noticed others of the same function. Several forks run at the same time, since many
tests wait for other processes. The results stand where mutmut has its own: `mutmut results` and `mutmut show` print them. A
mutant is tried again if its function has changed.
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
"""Seconds that a test may take with a mutant, beside three times what it took without one. Waits for a CPU do not count."""

TOGETHER = 4 * len(os.sched_getaffinity(0))
"""How many mutants are tried at the same time: four for each CPU that taskset has left to this process. Tests mostly wait."""

SHORTEST = 14.0
"""Seconds. Every deadline in a test is longer. So a test that fails sooner has not failed by a deadline."""

BUSY = 0.25
"""If a test waits for a CPU for more than this part of its time, a missed deadline proves nothing."""

ARGUMENTS = ("--rootdir=.", "-q", "-p", "tests.mutants", "-p", "no:cacheprovider", "-p", "no:xdist")


@define
class Trial:
    """A plugin of pytest that tries one module's mutants instead of running the tests once.

    ``again``: mutants with these results are tried; None: those without a result. ``reached``: the tests that call a function.
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
            self._run_without_mutant(item)
        self._try_none(session.items)
        codes = self.results.exit_code_by_key
        chosen = [mutant for mutant, code in codes.items() if code in self.again]
        self._try_all(sorted(chosen, key=lambda each: self._seconds(self.reached[function_of(each)])), items)
        # If the tests fail without a mutant now, they may have failed with the mutants for the same reason: no result counts.
        self._try_none(session.items)
        print(f"{self.module}: {Counter(codes.values())[SURVIVED]} of {len(codes)} survived")  # noqa: T201
        return True

    def _try_none(self, items: Sequence[pytest.Item]) -> None:
        attempt = Attempt.of("", items, self.took)
        while (code := attempt.code()) is None:
            time.sleep(0.1)
        if code != SURVIVED:
            sys.exit(f"{attempt.test} fails in a fork without a mutant")

    def _try_all(self, mutants: list[str], items: dict[str, pytest.Item]) -> None:
        running: list[Attempt] = []
        try:
            while mutants or running:
                while mutants and len(running) < TOGETHER:
                    mutant = mutants.pop(0)
                    if tests := self._tests(mutant):
                        running.append(Attempt.of(mutant, [items[test] for test in tests], self.took))
                    else:
                        self.results.exit_code_by_key[mutant] = NO_TESTS
                for attempt in list(running):
                    if (code := attempt.code()) is not None:
                        running.remove(attempt)
                        self._keep(attempt, code)
                time.sleep(0.02)
        finally:
            for attempt in running:
                attempt.end()
            self.results.save()

    def _tests(self, mutant: str) -> list[str]:
        function = function_of(mutant)
        return sorted(self.reached[function], key=lambda test: (-self.noticed[function, test], self.took[test]))

    def _keep(self, attempt: Attempt, code: int) -> None:
        if code != SURVIVED and attempt.was_starved():
            print(f"not judged, the machine is too busy: {attempt.mutant}", flush=True)  # noqa: T201
            return
        if code == SURVIVED:
            print(f"survived: {attempt.mutant}", flush=True)  # noqa: T201
        else:
            self.noticed[function_of(attempt.mutant), attempt.test] += 1
        self.results.exit_code_by_key[attempt.mutant] = code
        self.results.save()

    def _seconds(self, tests: set[str]) -> float:
        return sum(self.took[test] for test in tests)

    def _run_without_mutant(self, item: pytest.Item) -> None:
        state()._stats.clear()
        began = time.monotonic() - _waited_for_a_cpu(os.getpid())
        if _fails(item):
            sys.exit(f"{item.nodeid} fails without a mutant")
        self.took[item.nodeid] = time.monotonic() - _waited_for_a_cpu(os.getpid()) - began
        outside = self.module in OF_ITS_OWN.get(item.path.name, ())
        for name in functions(self.module) if outside else state()._stats:
            self.reached[name].add(item.nodeid)


@define
class Attempt:
    """A fork that runs tests with a mutant until one fails.

    ``test``: the test that runs, since ``began``. ``waited``: the seconds since then for which its processes waited for a CPU.
    ``seen``: the seconds for which its present processes have waited in all.
    """

    mutant: str
    took: dict[str, float]
    child: int
    begun: int
    test: str = ""
    began: float = field(factory=time.monotonic)
    waited: float = 0.0
    seen: float = 0.0

    @classmethod
    def of(cls, mutant: str, items: Sequence[pytest.Item], took: dict[str, float]) -> Attempt:
        """Begin. ``took``: the seconds of each test without a mutant."""
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            _run(mutant, items, writer)
        os.close(writer)
        os.set_blocking(reader, False)
        return cls(mutant, took, child, reader)

    def code(self) -> int | None:
        """The result; None while it runs."""
        ended, status = os.waitpid(self.child, os.WNOHANG)
        before, self.seen = self.seen, _waited_for_a_cpu(self.child)
        self.waited += max(0.0, self.seen - before)  # less if a process has ended
        with suppress(BlockingIOError):
            if names := os.read(self.begun, 1 << 16).decode().splitlines():
                self.test, self.began, self.waited = names[-1], time.monotonic(), 0.0
        ran = time.monotonic() - self.began - self.waited
        late = not ended and ran > SLACK + 3 * self.took.get(self.test, 0.0)
        if not ended and not late:
            return None
        self.end()
        return TIMEOUT if late else KILLED if status else SURVIVED

    def was_starved(self) -> bool:
        """Whether the last test may have failed because the machine was too busy."""
        lasted = time.monotonic() - self.began
        return lasted > SHORTEST and self.waited > BUSY * lasted

    def end(self) -> None:
        """Kill what is left of it and of the processes that it started."""
        os.close(self.begun)
        with suppress(ProcessLookupError):
            os.killpg(self.child, signal.SIGKILL)
        with suppress(ChildProcessError):
            os.waitpid(self.child, 0)


def _fails(item: pytest.Item) -> bool:
    return any(report.failed for report in runtestprotocol(item, nextitem=None, log=False))


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
