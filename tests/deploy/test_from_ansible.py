"""The task of docs/how-to/move-from-ansible.md, by which a playbook calls the deploy."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.common.archive import ROOT

pytestmark = pytest.mark.slow

DEPLOY = """
from pyinfra.operations import files
files.directory(name="A folder", path={path!r})
"""


def test_the_task_has_changed_something_if_the_deploy_has(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "how-to" / "move-from-ansible.md").read_text()
    (playbook,) = (text for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL) if "command" in text)
    programs = Path(sys.executable).parent
    inventory = tmp_path / "prod.py"
    own = {".venv/bin": programs, "/srv/trackbed": tmp_path, "/srv/fleet/inventories/prod.py": inventory}
    for there, here in own.items():
        assert there in playbook
        playbook = playbook.replace(there, str(here))
    inventory.write_text('hosts = ["@local"]\n')
    (tmp_path / "deploy.py").write_text(DEPLOY.format(path=str(tmp_path / "made")))
    (tmp_path / "playbook.yaml").write_text(playbook)
    command = [str(programs / "ansible-playbook"), "--connection=local", str(tmp_path / "playbook.yaml")]
    environment = {**os.environ, "ANSIBLE_HOME": str(tmp_path / "ansible"), "ANSIBLE_NOCOLOR": "1"}
    recaps = []
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        recaps += re.findall(r"changed=(\d)", done.stdout)
    assert recaps == ["1", "0"]
