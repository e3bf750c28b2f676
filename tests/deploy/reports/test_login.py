"""Public reports of logins by ssh as another user than root."""

from pathlib import Path

from tests.deploy.fake import deployed

UPLOAD = "from pyinfra import host\nprint('uploads to', host.get_temp_filename('/etc/trackbed/node.json'))\n"


def test_files_are_uploaded_where_the_login_user_may_write(tmp_path: Path) -> None:
    """Root's environment has a folder that only root may write to."""
    done = deployed(tmp_path, {"node-a": {"_sudo": True, "fake_responses": {"$TMPDIR": "/tmp/user/0"}}}, UPLOAD)
    assert "uploads to /tmp/pyinfra-" in done.stdout
