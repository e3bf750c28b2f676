"""State files of earlier versions of the agent: the present one reads them, or reports that it cannot.

Each folder of `state_files/` has what one version wrote (by its own code), named after what is different from the one before.
A version that writes one of these files in another form adds a folder.
"""

import json
import zlib
from pathlib import Path

import pytest

from agent.engine.originals import Originals
from agent.report import history
from agent.report.records import report_from_json
from agent.report.verdict import why_not_ready
from agent.service.spec_in_force import SpecInForce

FILES = Path(__file__).with_name("state_files")
FOLDERS = sorted(path for path in FILES.iterdir() if path.is_dir())
PF = "0000:21:00.0"


@pytest.fixture(params=FOLDERS, ids=lambda folder: folder.name)
def folder(request: pytest.FixtureRequest) -> Path:
    path: Path = request.param
    return path


def test_a_report_of_another_boot_is_read_but_does_not_count(folder: Path) -> None:
    report = report_from_json((folder / "report.json").read_text())
    assert (report.node_name, report.ready, report.generation) == ("n1", True, 7)
    assert [(outcome.change.target, outcome.result) for outcome in report.outcomes] == [(PF, "applied"), (PF, "failed")]
    assert "boot" in str(why_not_ready(report, "another boot", report.uptime))


def test_the_verified_spec_of_each_version_is_read(folder: Path, tmp_path: Path) -> None:
    verified = SpecInForce(folder, tmp_path).verified
    assert verified is not None
    [nic] = verified.nics
    assert (nic.name, nic.mtu, nic.vfs and nic.vfs.count) == ("rail0", 9000, 4)


def test_the_history_of_each_version_is_read(folder: Path) -> None:
    entries = list(history.read(folder))
    assert [entry.outcome.result for entry in entries] == (["applied", "failed"] if entries else [])
    assert bool(entries) is (folder / history.NAME).exists()


def test_the_originals_of_each_version_are_read_or_reported_lost(folder: Path) -> None:
    originals = Originals.load(folder / "originals.jsonl", keep=False)
    condition = originals.condition
    if folder.name == "originals-without-checksums":
        assert condition is not None
        assert (condition.reason, condition.remedy) == ("Unreadable", "set those by hand")
    else:
        assert condition is None


@pytest.mark.parametrize(
    "document",
    [
        [],
        {},
        "text",
        7,
        ["links", PF, "mtu", 1500],
        ["links", PF, "mtu", 1500, 9000],
        ["links", PF, "mtu", {"a": "b"}, []],
    ],
)
def test_originals_in_an_unknown_form_are_reported_lost(tmp_path: Path, document: object) -> None:
    text = json.dumps(document).encode()
    (tmp_path / "originals.jsonl").write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    condition = Originals.load(tmp_path / "originals.jsonl", keep=False).condition
    assert condition is not None
    assert condition.reason == "Unreadable"
