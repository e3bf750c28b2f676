"""The timer of pull mode and its files, on the fake connector."""

import json
from pathlib import Path
from typing import Any

from tasks import pull, time_limits
from tasks.common.commands import script
from tasks.common.systemd_reload import RELOAD
from tasks.common.texts import Present
from tasks.packages import NO_PYTHON
from tests.deploy.conftest import LOSERS, Node, of

GIVEN = {"url": "https://example.net/t.tar.gz", "inventory": "inventories/prod.py"}


def data(keys: Path, **more: Any) -> dict[str, Any]:
    return {**GIVEN, "keyring": str(keys / "ours.gpg"), **more}


def test_the_timer_and_its_files_are_installed(node: Node, keys: Path) -> None:
    result = node.deploy(pull.serve, {}, pull=data(keys, every=30))
    assert json.loads(result.uploads[pull.SETTINGS]) == {**GIVEN, "host": "@fake/node-a"}
    assert result.uploads[pull.KEYRING] == (keys / "ours.gpg").read_bytes()
    timer = result.uploads["/etc/systemd/system/trackbed-pull.timer"].decode()
    assert "OnUnitInactiveSec=30min" in timer
    assert "RandomizedDelaySec=450s" in timer
    service = result.uploads["/etc/systemd/system/trackbed-pull.service"].decode()
    assert "for python in /usr/bin/python3 /usr/bin/python3.11; do" in service
    assert f'echo "{NO_PYTHON}" >&2; exit 1' in service
    # A run that systemd ends begins its builds again, each of which may take two hours.
    assert f"TimeoutStartSec={time_limits.LONGEST}\n" in service
    assert result.commands["Pull | Timer runs"] == [
        str(script(RELOAD)),
        "systemctl enable trackbed-pull.timer",
        "systemctl restart trackbed-pull.timer",
    ]


def test_a_timer_whose_reload_would_take_gpus_from_containers_waits(node: Node, keys: Path) -> None:
    result = node.deploy(pull.serve, {LOSERS: ["docker-a.scope"]}, pull=data(keys, every=30))
    assert result.commands["Pull | Timer runs"] == []
    assert any("deferred: the timer of pull mode: " in line for line in result.log)


def test_without_the_key_there_is_no_timer(node: Node) -> None:
    assert node.deploy(pull.serve, {}).flat == []
    (removed,) = node.deploy(pull.serve, {of(Present): [pull.SETTINGS]}).flat
    assert removed.endswith(" ".join(("sh", pull.TIMER, *pull.PATHS)))


def test_an_inventory_that_this_project_lacks_is_a_warning(node: Node, keys: Path) -> None:
    log = node.deploy(pull.serve, {}, pull=data(keys, inventory="inventories/absent.py")).log
    assert any("inventories/absent.py is not a file" in line for line in log)
    assert not any("is not a file of the site" in line for line in node.deploy(pull.serve, {}, pull=data(keys)).log)
