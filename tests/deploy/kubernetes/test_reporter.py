import subprocess
from pathlib import Path

import pytest
from attrs import evolve
from jinja2 import Template

from tasks import agent
from tasks.common import systemd_reload
from tasks.common.commands import script
from tasks.common.status import COMMAND
from tasks.kubernetes import reporter
from tests.deploy.conftest import DEBIAN, SERVICE, Answers, Node, file_answers

VERSION = "0.1.0-0123456789ab"
ABSENT = {**DEBIAN, SERVICE: ["ActiveState=inactive", "UnitFileState=", "NeedDaemonReload=no"]}
RUNS = {
    **DEBIAN,
    SERVICE: [
        "ActiveState=active",
        "UnitFileState=enabled",
        "NeedDaemonReload=no",
        f"Command=/usr/bin/python3 -I /opt/trackbed/versions/{VERSION} reporter --listen 127.0.0.1:9809 ",
    ],
}
LOOPBACK = Template(reporter.UNIT_TEMPLATE.read_text(), keep_trailing_newline=True).render(
    command=COMMAND, listen="127.0.0.1:9809", allowed="localhost", secret=None, copied=False, options=""
)
"""The unit on a node without any settings."""
PUBLISHES = {"kubernetes": {"server": "https://10.0.0.1:6443", "ca_file": "/nowhere"}}


def serve() -> None:
    reporter.serve(version=VERSION)


def unit(node: Node, **data: object) -> str:
    return evolve(node, data=data).deploy(serve, ABSENT).uploads[reporter.UNIT_FILE].decode()


def test_a_fresh_node_gets_unit_and_service(node: Node) -> None:
    result = node.deploy(serve, ABSENT)
    assert list(result.uploads) == [reporter.UNIT_FILE]
    assert result.commands["Reporter | Service"] == [
        str(script(systemd_reload.RELOAD)),
        f"systemctl enable {reporter.UNIT}",
        str(script(agent._CONTROL, "start", reporter.UNIT, agent.BASE)),
    ]


def test_another_version_restarts_the_reporter_and_the_same_does_not(node: Node) -> None:
    settled: Answers = {**RUNS, **file_answers(reporter.UNIT_FILE, LOOPBACK)}
    assert not any(node.deploy(serve, settled).planned.values())
    result = node.deploy(lambda: reporter.serve(version="0.1.0-another"), settled)
    assert result.flat == [str(script(agent._CONTROL, "restart", reporter.UNIT, agent.BASE))]


def test_by_default_the_reporter_listens_only_on_loopback(node: Node) -> None:
    text = unit(node)
    assert "reporter --listen 127.0.0.1:9809 --socket /run/trackbed-reporter/http.sock\n" in text
    assert "IPAddressDeny=any\nIPAddressAllow=localhost\n" in text
    assert "LoadCredential" not in text


def test_where_systemd_has_no_credentials_the_unit_makes_a_copy(node: Node) -> None:
    def settings(*version: str) -> str:
        answers = {**ABSENT, "systemctl --version": list(version)}
        return evolve(node, data=PUBLISHES).deploy(serve, answers).uploads[reporter.UNIT_FILE].decode()

    old = settings("systemd 239 (239-82.el8_10.2)", "+PAM +AUDIT")
    assert "LoadCredential" not in old
    assert (
        "Environment=CREDENTIALS_DIRECTORY=/run/trackbed-reporter/credentials\n"
        "ExecStartPre=+/usr/bin/install -d -m 500 -o trackbed-reporter /run/trackbed-reporter/credentials\n"
        "ExecStartPre=+/usr/bin/install -m 400 -o trackbed-reporter /etc/trackbed/kubernetes-secret "
        "/run/trackbed-reporter/credentials/kubernetes\n"
    ) in old
    assert "\nRestart=always\n" in old
    assert settings("systemd 252 (252.39-1~deb12u1)") == settings() == unit(node, **PUBLISHES)


@pytest.mark.parametrize("version", ["systemd 239", "systemd 252"])
@pytest.mark.parametrize("data", [{}, PUBLISHES])
def test_systemd_reads_the_unit_as_meant(node: Node, data: dict[str, object], version: str, tmp_path: Path) -> None:
    if not Path("/usr/bin/systemd-analyze").exists():
        pytest.skip("no systemd-analyze here")
    file = tmp_path / reporter.UNIT
    made = evolve(node, data=data).deploy(serve, {**ABSENT, "systemctl --version": version})
    text = made.uploads[reporter.UNIT_FILE].decode()
    file.write_text(text.replace("/usr/local/bin/trackbed", "/bin/true"))
    checked = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False)
    assert (checked.returncode, checked.stderr) == (0, "")


def test_a_machine_that_is_busy_with_its_boot_has_time_to_start_it(node: Node) -> None:
    limits = [line for line in unit(node).splitlines() if line.startswith("TimeoutStartSec=")]
    agent = Path("templates/trackbed.service.j2").read_text().splitlines()
    assert limits == ["TimeoutStartSec=300"] == [line for line in agent if line.startswith("TimeoutStartSec=")]


@pytest.mark.parametrize(
    ("server", "allowed"), [("https://10.0.0.1:6443", "localhost 10.0.0.1"), ("https://cluster.example.net", None)]
)
def test_the_unit_may_reach_the_api_server_and_store_its_certificate(
    node: Node, server: str, allowed: str | None
) -> None:
    text = unit(node, kubernetes={"server": server, "ca_file": "/nowhere"})
    (command,) = [line for line in text.splitlines() if line.startswith("ExecStart=")]
    assert (
        " --kubernetes /etc/trackbed/reporter.json --kubernetes-secret ${CREDENTIALS_DIRECTORY}/kubernetes" in command
    )
    assert "LoadCredential=kubernetes:/etc/trackbed/kubernetes-secret\n" in text
    assert "StateDirectory=trackbed-reporter\nStateDirectoryMode=0700\n" in text
    assert [line for line in text.splitlines() if line.startswith("IPAddressAllow=")] == (
        [f"IPAddressAllow={allowed}"] if allowed else []
    )
