"""Asks all hosts what hardware they have, and writes an inventory and group data: docs/inventory/running-servers.md.

The agent is staged on each node, as a deploy does it first, and asked. Nothing else changes on a node.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from weakref import WeakKeyDictionary, WeakSet

import cattrs
from attrs import evolve, frozen
from pyinfra.api.command import FunctionCommand, StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host

from agent.documents import LARGEST_REPORT, load
from agent.report.printable import printable
from tasks.agent import folder
from tasks.common import inventory
from tasks.common.commands import Commands, fail, refuse, warn
from tasks.common.facts import FactBase
from tasks.common.site import root_of
from tasks.discovery.profiles import Profile, Server, profiles
from tasks.discovery.texts import data_text, inventory_text
from tasks.node_spec import node_spec
from tasks.packages import INTERPRETERS, NodePython

# Its exit code is 2 if the plan of what it prints is not empty; the lines of that are in the answer, too.
_ASK = """
python=$1 agent=$2
[ -e "$agent" ] || exit 0
code=0
"$python" -I "$agent" inspect --as-inventory --json 2>/dev/null || code=$?
if [ "$code" != 0 ] && [ "$code" != 2 ]; then "$python" -I "$agent" inspect --as-inventory --json 2>&1 || true; fi
"""


@frozen
class Answer:
    """A node's answer, or why there is none."""

    server: Server | None = None
    fault: str = ""


class NodeInventory(FactBase[Answer]):
    """What the node's staged agent says of the hardware."""

    prefetched = False

    def command(self, version: str, python: str) -> StringCommand:
        """Run `trackbed inspect --as-inventory --json`."""
        return self.script(_ASK, python, folder(version))

    def process(self, output: list[str]) -> Answer:
        """Parse the line with the JSON object."""
        for line in output:
            if line.startswith("{"):
                return Answer(cattrs.structure(load(line, LARGEST_REPORT), Server))
        return Answer(fault="; ".join(line for line in output if line) or "the agent is not on the node")


@frozen
class Site:
    """The inventory that was asked, and the files that are written beside it."""

    asked: Path

    @classmethod
    def here(cls) -> Site:
        """That of this run.

        :raises DeployError: it is not a file; or an earlier discovery has written its own.
        """
        asked = inventory.file()
        if asked is None:
            raise DeployError("the discovery writes beside the inventory, so give an inventory's file, not hosts")
        site = cls(asked)
        site.refuse_to_replace([site.inventory])
        return site

    @property
    def inventory(self) -> Path:
        """The inventory that is written."""
        return self.asked.with_name(f"{self.asked.stem}_by_hardware.py")

    def group(self, name: str) -> Path:
        """The file of a group's data, where both inventories have it read."""
        return root_of(self.asked) / "group_data" / f"{name}.py"

    def refuse_to_replace(self, files: list[Path]) -> None:
        """Check that there is none of these files.

        :raises DeployError: there is one.
        """
        if there := [str(file) for file in files if file.exists()]:
            raise DeployError(
                f"{', '.join(there)}: exists, and is not replaced; move it away, and compare the new one with it"
            )


_answers: WeakKeyDictionary[State, dict[str, Server]] = WeakKeyDictionary()
_written: WeakSet[State] = WeakSet()


@deploy("Hardware")
def discover(version: str) -> None:
    """Ask the node, and write the files once all have answered. ``version``: the staged agent."""
    site = Site.here()
    ask(name="Ask", version=version)
    write(name="Write", site=site)


@operation()
def ask(version: str) -> Commands:
    """Keep the node's answer, or refuse it if a host's data cannot have these values."""
    answers = _answers.setdefault(host.state, {})
    if not host.state.is_executing:
        yield FunctionCommand(_done, (), {})
        return
    answer = host.get_fact(NodeInventory, version=version, python=host.get_fact(NodePython) or INTERPRETERS[0])
    found = answer.server
    if found is None:
        yield refuse(f"the node does not say what it has: {answer.fault}")
        return
    try:
        node_spec({"node_name": found.node_name, "nics": list(found.nics), **found.data}, host.name)
    except DeployError as error:
        yield refuse(f"what the node has cannot be data of a host: {error}")
        return
    for line in found.remaining:
        warn(host, f"a deploy of what was found would still change: {line}")
    if given := tuple(key for key in ("nics", *found.data) if host.data.get(key) is not None):
        warn(host, f"the inventory has {', '.join(given)} already, which counts before what was found")
    # The name that the inventory gives counts.
    answers[host.name] = evolve(
        found, given=given, node_name=host.name if host.data.get("node_name") else found.node_name
    )
    host.log(
        printable(
            f"{len(found.nics)} NICs to configure, {len(found.functions)} network functions, {len(found.gpus)} GPUs"
        )
    )
    yield FunctionCommand(_done, (), {})


def _done(state: State, host: Host) -> bool:
    return True


@operation()
def write(site: Site) -> Commands:
    """Write the files. The first host that finds all answers does so, for all: the first, or with --serial the last one."""
    yield FunctionCommand(_write, (site,), {})


def _write(state: State, host: Host, site: Site) -> bool:
    answers = dict(sorted(_answers[state].items()))
    if state in _written or {each.name for each in state.active_hosts} - answers.keys():
        return True
    _written.add(state)
    found = profiles(answers, {"all", site.inventory.stem, *state.inventory.groups})
    texts: Mapping[Path, str] = {
        site.inventory: inventory_text(site.asked.name, found),
        **{site.group(each.name): data_text(each) for each in found},
    }
    try:
        site.refuse_to_replace([*texts])
        for path, text in texts.items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
    except DeployError as error:
        return fail(host, str(error))
    except OSError as error:
        return fail(host, f"{error.filename} cannot be written: {error.strerror}")
    for each in found:
        host.log(printable(_said(each)))
    missing = sorted(each.name for each in state.inventory if state.is_host_in_limit(each) and each.name not in answers)
    if missing:
        warn(host, f"not asked: {', '.join(missing)}; they are in none of these groups")
    host.log(f"read {site.inventory} and its group_data, then: pyinfra {site.inventory} deploy.py --dry")
    return True


def _said(profile: Profile) -> str:
    others = sum(bool(data) for data in profile.servers.values())
    return f"{profile.name}: {len(profile.servers)} servers" + (
        f", {others} with values of their own" if others else ""
    )
