"""`make release`: whether this checkout can be released. Prints a checklist, and stops at the first point that is missing.

Example: .venv/bin/python -m tests.release
Exit code: 0 all is there, 1 something is missing.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from xml.etree import ElementTree

from attrs import frozen

from agent.runtime import version
from tasks.common import archive

ENTRY_LINES = 60
"""The most lines of a changelog's entry that somebody reads."""

RESULTS = ".results"
SUITES = ("unit", "contract", "deploy", "lab", "cluster")
"""Each has its results, of its last run, in RESULTS. `make test` and `make cluster-suite` write them."""


class Missing(Exception):
    """What is missing for a release, and what to do."""


@frozen
class Checkout:
    """The checkout, and the version that it is to be released as."""

    root: Path
    version: str

    @property
    def tag(self) -> str:
        """The name of the version's tag."""
        return f"v{self.version}"

    def git(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run git in it."""
        return subprocess.run(["git", *words], cwd=self.root, capture_output=True, text=True, check=False)


def tree(checkout: Checkout) -> str:
    """Everything is committed."""
    changed = checkout.git("status", "--porcelain").stdout.splitlines()
    if changed:
        raise Missing(f"{len(changed)} files are not committed, as {changed[0][3:]}: commit or remove them")
    return checkout.git("rev-parse", "--short", "HEAD").stdout.strip()


def number(checkout: Checkout) -> str:
    """The version is a release's."""
    if not re.fullmatch(r"[1-9]\d*\.\d+\.\d+", checkout.version):
        raise Missing(f"pyproject.toml: {checkout.version} is not MAJOR.MINOR.PATCH: correct it")
    return checkout.version


def changelog(checkout: Checkout) -> str:
    """The changelog has an entry of this version, and nothing after it."""
    text = (checkout.root / "CHANGELOG.md").read_text()
    entries = {title: body.strip() for title, body in re.findall(r"^## (.*)\n((?:(?!## ).*\n)*)", text, re.MULTILINE)}
    title = next((title for title in entries if title.startswith(f"[{checkout.version}]")), None)
    if title is None:
        raise Missing(f"CHANGELOG.md has no entry ## [{checkout.version}] - DATE: write it")
    if not re.fullmatch(r"\[.*\] - \d{4}-\d\d-\d\d", title):
        raise Missing(f"CHANGELOG.md: ## {title} has no date: write it as ## [{checkout.version}] - 2026-01-31")
    if entries.get("[Unreleased]"):
        raise Missing(f"CHANGELOG.md has lines under Unreleased: move them below {title}")
    lines = len(entries[title].splitlines())
    if not 1 <= lines <= ENTRY_LINES:
        raise Missing(f"CHANGELOG.md: {title} has {lines} lines: a reader takes in 1 to {ENTRY_LINES}")
    return f"{title}, {lines} lines"


def results(checkout: Checkout) -> str:
    """All suites have passed on this commit."""
    committed = float(checkout.git("log", "-1", "--format=%ct").stdout)
    passed = 0
    for name in SUITES:
        file = checkout.root / RESULTS / f"{name}.xml"
        try:
            suites = list(ElementTree.parse(file).getroot().iter("testsuite"))  # noqa: S314  written by our own pytest
        except (OSError, ElementTree.ParseError):
            raise Missing(f"{RESULTS}/{name}.xml is missing or damaged: run `make test cluster-suite`") from None
        counts = {
            key: sum(int(each.get(key, 0)) for each in suites) for key in ("tests", "failures", "errors", "skipped")
        }
        if counts["failures"] or counts["errors"] or counts["tests"] == counts["skipped"]:
            raise Missing(f"{RESULTS}/{name}.xml: {counts}: mend what failed, and run the suite again")
        if min(datetime.fromisoformat(each.get("timestamp", "1970-01-01")).timestamp() for each in suites) < committed:
            raise Missing(f"{RESULTS}/{name}.xml is older than the commit: run `make test cluster-suite`")
        passed += counts["tests"] - counts["skipped"]
    return f"{passed} tests passed"


def reproducible(checkout: Checkout) -> str:
    """The agent's archive is the same, byte for byte, if it is built twice."""
    program = "import sys; from tasks.common import archive; print(archive.build(sys.argv[1]))"
    hashes: dict[str, str] = {}
    for machine in archive.MACHINES:
        made = set()
        for seed in ("1", "2"):
            with tempfile.TemporaryDirectory() as cache:
                done = subprocess.run(
                    [sys.executable, "-c", program, machine],
                    cwd=checkout.root,
                    env={**os.environ, "XDG_CACHE_HOME": cache, "PYTHONHASHSEED": seed},
                    capture_output=True, text=True, check=False,
                )  # fmt: skip
                if done.returncode:
                    raise Missing(f"the archive for {machine} cannot be built: {done.stderr.strip().splitlines()[-1]}")
                made.add(sha256(Path(done.stdout.strip()).read_bytes()).hexdigest())
        if len(made) > 1:
            raise Missing(f"the archive for {machine} is not reproducible: tests/deploy/common/test_reproducible.py")
        (hashes[machine],) = made
    return ", ".join(f"{machine} sha256 {digest[:12]}" for machine, digest in hashes.items())


def bill_of_materials(checkout: Checkout) -> str:
    """The bill of materials can be made, and has each library of the lock."""
    made = subprocess.run(["make", "--silent", "sbom"], cwd=checkout.root, capture_output=True, text=True, check=False)
    if made.returncode:
        raise Missing(f"`make sbom` failed: {(made.stderr or made.stdout).strip().splitlines()[-1]}")
    components = {each["name"] for each in json.loads((checkout.root / "sbom.json").read_text())["components"]}
    locked = set(re.findall(r"^([\w.-]+)==", archive.REQUIREMENTS.read_text(), re.MULTILINE))
    if lost := sorted(locked - components):
        raise Missing(f"sbom.json lacks {', '.join(lost)}: see `make sbom`")
    return f"sbom.json, {len(components)} components"


def signature(checkout: Checkout) -> str:
    """The commit has the version's tag, with a good signature. (Archives of pull mode are signed by each site's own key.)"""
    tagged = checkout.git("rev-parse", "--verify", "--quiet", f"{checkout.tag}^{{commit}}").stdout.strip()
    if not tagged:
        raise Missing(f"there is no tag {checkout.tag}: git tag --sign {checkout.tag}")
    if tagged != checkout.git("rev-parse", "HEAD").stdout.strip():
        raise Missing(f"the tag {checkout.tag} is of another commit: give the release another version")
    verified = checkout.git("verify-tag", checkout.tag)
    if verified.returncode:
        said = verified.stderr.strip().splitlines()
        raise Missing(f"the signature of {checkout.tag} is not good: {said[-1] if said else 'it has none'}")
    return checkout.tag


CHECKS: tuple[Callable[[Checkout], str], ...] = (
    *(tree, number, changelog, results),
    *(reproducible, bill_of_materials, signature),
)


def checklist(checkout: Checkout) -> Iterator[tuple[bool, str]]:
    """Whether each point is there, with its text; the first that is missing is the last one."""
    for check in CHECKS:
        what = str(check.__doc__).partition(".")[0]
        try:
            yield True, f"{what}: {check(checkout)}"
        except Missing as error:
            yield False, f"{what}: no, {error}"
            return


def main() -> int:
    """Print the checklist; the exit code."""
    good = True
    for good, line in checklist(Checkout(archive.ROOT, version())):
        sys.stdout.write(f"[{'x' if good else ' '}] {line}\n")
        sys.stdout.flush()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
