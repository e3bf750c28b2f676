"""Runs many reporters in one process, each with its own threads, connections and watch.

Its one argument is a JSON file: a list of members. Each line on standard input says in JSON what their agents report. The
process ends with its input.
"""

import json
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

from attrs import evolve, field, frozen

from agent.report.records import NicVerdict, from_plain
from agent.reporter.kubernetes.api import Session, trust
from agent.reporter.settings import Settings
from agent.service.supervisor import HEARTBEAT
from tests.cluster.reporter.reporters import Fixed, Reporter


@frozen
class Member:
    """One reporter. ``folder``: where its files are. ``nics``: its node's NICs, all good."""

    folder: str
    settings: Settings
    token: str
    nics: tuple[NicVerdict, ...] = ()

    def start(self) -> Reporter:
        """Start its reporter."""
        identity = Fixed(Session(trust(Path(self.settings.ca_file)), self.token))
        return Reporter.start(None, Path(self.folder), self.settings, identity)


@frozen
class Said:
    """What all agents report. ``bad``: the names of the bad NICs by node. A node whose NICs are all bad is not ready."""

    ready: bool
    bad: Mapping[str, tuple[str, ...]] = field(factory=dict)

    def nics(self, member: Member) -> tuple[NicVerdict, ...]:
        """The verdicts of a member's NICs."""
        bad = self.bad.get(member.settings.node_name, ())
        return tuple(evolve(nic, ready=False, reason="NoCarrier") if nic.name in bad else nic for nic in member.nics)


def main() -> None:
    """Run them until standard input ends."""
    threading.stack_size(256 * 1024)
    members = from_plain(json.loads(Path(sys.argv[1]).read_text()), tuple[Member, ...])
    fleet = [(member, member.start()) for member in members]
    over = threading.Event()

    def beat() -> None:
        while not over.wait(HEARTBEAT):
            for _, reporter in fleet:
                # Do not wake them: a thousand threads at once would take CPU time from the API server on this machine.
                reporter.beat()

    threading.Thread(target=beat, daemon=True).start()
    for line in sys.stdin:
        said = from_plain(json.loads(line), Said)
        for member, reporter in fleet:
            nics = said.nics(member)
            ready = said.ready and (not nics or any(nic.ready for nic in nics))
            if (ready, nics) != (reporter.report.ready, reporter.report.nics):
                reporter.say(ready, nics=nics)
    over.set()


if __name__ == "__main__":
    main()
