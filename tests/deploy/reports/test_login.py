"""Public reports of logins by ssh as another user than root."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.fake import deployed

UPLOAD = "from pyinfra import host\nprint('uploads to', host.get_temp_filename('/etc/trackbed/node.json'))\n"


@pytest.mark.parametrize("environment", [pytest.param("/tmp/user/0", id="pyinfra-1440")])
def test_files_are_uploaded_where_the_login_user_may_write(tmp_path: Path, environment: str) -> None:
    """Root's environment has a folder that only root may write to."""
    done = deployed(tmp_path, {"node-a": {"_sudo": True, "fake_responses": {"$TMPDIR": environment}}}, UPLOAD)
    assert "uploads to /tmp/pyinfra-" in done.stdout
