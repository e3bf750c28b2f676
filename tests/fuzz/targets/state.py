"""Files of the agent's state: originals, verified, observed and failed specs, and the memory that it shares with its worker."""

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from agent.engine.originals import ORIGINALS, Originals, _line, _Original
from agent.report.records import Numbers, Place
from agent.service.activity import SIZE, Activity, View
from agent.service.spec_in_force import OBSERVED, STATE, VERIFIED, SpecInForce
from agent.spec.node import to_json
from tests.fuzz.targets import choose, chosen
from tests.fuzz.targets.spec import example

FOLDER = Path(tempfile.mkdtemp(prefix="trackbed-fuzz-state-"))


def _originals(data: bytes) -> None:
    path = FOLDER / ORIGINALS
    path.write_bytes(data)
    first = Originals.load(path)
    again = Originals.load(path, keep=False)
    assert again._originals == first._originals


def _spec(name: str) -> None:
    SpecInForce(FOLDER, FOLDER)
    (FOLDER / name).unlink()


def _verified(data: bytes) -> None:
    (FOLDER / VERIFIED).write_bytes(data)
    _spec(VERIFIED)


def _observed(data: bytes) -> None:
    (FOLDER / OBSERVED).write_bytes(data)
    _spec(OBSERVED)


def _failed(data: bytes) -> None:
    (FOLDER / STATE).write_bytes(data)
    _spec(STATE)


def _activity(data: bytes) -> None:
    view = View.new()
    try:
        activity = Activity.at(view.descriptor)
        activity._memory[: min(len(data), SIZE)] = data[:SIZE]
        step = view.step()
        str(step)
        view.waits()
    finally:
        view.close()


def check(data: bytes) -> None:
    """Read one file."""
    choose(data, (_originals, _verified, _observed, _failed, _activity))


def seeds() -> Sequence[bytes]:
    """One file of each form."""
    values = (4, True, "auto", None, Numbers.of({"rx": 4, "tx": None}))
    lines = b"".join(
        _line(Place("vfs", "0000:21:00.0", str(at)), _Original(value, (value,))) for at, value in enumerate(values)
    )
    text = b"vfs\nread\n0000:21:00.0\nopen"
    head = (2).to_bytes(8, "little") + b"\0\0\0\0\0\0\x59\x40" + len(text).to_bytes(4, "little")
    return [
        chosen(0, lines),
        chosen(1, to_json(example()).encode()),
        chosen(2, to_json(example()).encode()),
        chosen(3, json.dumps({"hash": "why"}).encode()),
        chosen(4, head + text),
    ]
