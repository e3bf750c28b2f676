"""Runs many reporters in one process, each with its own threads, connections and watch.

Its one argument is a JSON file: a list of folder, settings and token for each. Lines on standard input say what all
agents report: `ready` or `not ready`; it ends with its input.
"""

import json
import sys
import threading
from pathlib import Path
from typing import Any

from agent.reporter.kubernetes.api import Session, trust
from agent.reporter.settings import Settings
from agent.service.supervisor import HEARTBEAT
from tests.cluster.reporter.reporters import Fixed, Reporter


def start(each: dict[str, Any]) -> Reporter:
    """Start one reporter."""
    settings = Settings(**each["settings"])
    identity = Fixed(Session(trust(Path(settings.ca_file)), each["token"]))
    return Reporter.start(None, Path(each["folder"]), settings, identity)


def main() -> None:
    """Run them until standard input ends."""
    threading.stack_size(256 * 1024)
    fleet = [start(each) for each in json.loads(Path(sys.argv[1]).read_text())]
    over = threading.Event()

    def beat() -> None:
        while not over.wait(HEARTBEAT):
            for reporter in fleet:
                # Do not wake them: a thousand threads at once would take CPU time from the API server on this machine.
                reporter.beat()

    threading.Thread(target=beat, daemon=True).start()
    for line in sys.stdin:
        for reporter in fleet:
            reporter.say(line.strip() == "ready")
    over.set()


if __name__ == "__main__":
    main()
