"""Secrets are planted with the reporter and in the agent's folders, and looked for in all that a user of the node can see."""

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any

from agent.report import names
from agent.report.records import Report, report_to_json
from agent.reporter.settings import Settings, to_json
from agent.runtime import boot_id, uptime
from cli.support_bundle import collectors, write
from tests.unit.reporter.scripted import api_server, token_of

TOKEN = "s3cret-token-of-the-reporter"  # noqa: S105  the tests' own
KUBERNETES = token_of("n1")


def test_a_reporters_secrets_are_in_no_argument_environment_log_answer_or_file(tmp_path: Path) -> None:
    run, state = tmp_path / "run", tmp_path / "state"
    run.mkdir()
    state.mkdir()
    report = Report("n1", "h", boot_id(), "v", True, True, uptime=uptime())
    (run / names.REPORT).write_text(report_to_json(report))
    (tmp_path / "secret").write_text(KUBERNETES)
    asked: list[str] = []

    def answer(method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        asked.append(path)
        # Servers and proxies quote what they were sent.
        return 401, {"message": f"unknown: Authorization: Bearer {KUBERNETES}"}

    with api_server(tmp_path, answer) as (url, authority):
        (tmp_path / "settings").write_text(to_json(Settings("n1", url, str(authority))))
        words = ("--listen", "127.0.0.1:0", "--kubernetes", tmp_path / "settings")
        more = ("--kubernetes-secret", tmp_path / "secret", "--socket", tmp_path / "http.sock")
        command = [sys.executable, "-m", "cli", "reporter", *map(str, (*words, *more))]
        here = {**os.environ, "STATE_DIRECTORY": str(state), "RUNTIME_DIRECTORY": str(run)}
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=here
        ) as process:
            assert process.stdout is not None
            published, end = state / "published.json", time.monotonic() + 60
            while not published.exists() or not json.loads(published.read_text())["refused"]:
                assert time.monotonic() < end, "it has published nothing"
            proc = Path(f"/proc/{process.pid}")
            seen = proc.joinpath("cmdline").read_text() + proc.joinpath("environ").read_text()
            process.terminate()
            seen += process.stdout.read()
    assert asked
    seen += "".join(path.read_text() for folder in (run, state) for path in folder.rglob("*") if path.is_file())
    for secret in (KUBERNETES, KUBERNETES.rpartition(".")[2]):
        assert secret not in seen


def test_the_bundle_has_no_other_files_of_the_folders_it_reads(tmp_path: Path) -> None:
    for name in ("kubernetes-secret", "reporter.pem", "token", "tls.key", "pull.gpg"):
        (tmp_path / name).write_text(TOKEN)
    (tmp_path / "report.json").write_text(f'{{"message": "curl -H \'Authorization: Bearer {KUBERNETES}\'"}}')
    (tmp_path / "pull.json").write_text(f'{{"url": "https://user:{TOKEN}@mirror.example.net/a"}}')
    made = tmp_path / "bundle.tar.gz"
    wanted = [one for one in collectors((sys.executable, "-m", "cli"), (tmp_path,)) if one.command[0] == "cat"]
    write(made, wanted)
    with tarfile.open(made) as tar:
        texts = [file.read().decode() for entry in tar if (file := tar.extractfile(entry)) is not None]
    assert len(texts) > 3
    for secret in (TOKEN, KUBERNETES.rpartition(".")[2]):
        assert not any(secret in text for text in texts)
