"""Runs Prometheus on this host, from PATH or from Debian's package. The package is only unpacked, so no service starts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import frozen

from lab.cluster.programs import unpacked
from lab.errors import LabError

ROOT = Path(__file__).parents[1]
RULES = ROOT / "examples" / "prometheus"

DEADLINE = 180.0
LISTENS = re.compile(r'msg="Listening on".* address=127\.0\.0\.1:(\d+)')
"""Seconds. For hangs, not for speed."""


def program(name: str) -> Path:
    """`prometheus` or `promtool`. If PATH does not have it, the first call fetches Debian's package, or the test is skipped."""
    path = shutil.which(name)
    if path:
        return Path(path)
    try:
        return unpacked("prometheus") / "usr" / "bin" / name
    except LabError as error:
        pytest.skip(f"{name} is not installed, and Debian's package cannot be fetched: {error.what.splitlines()[0]}")


@frozen
class Prometheus:
    """A running server."""

    url: str

    def get(self, path: str, **query: str) -> Any:
        """The data in an answer of the server's API."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url, timeout=DEADLINE) as answer:  # noqa: S310  http
            return json.load(answer)["data"]

    def firing(self) -> set[tuple[str, str]]:
        """The alerts that fire: name and instance. The instance is empty if an alert has none."""
        alerts = self.get("alerts")["alerts"]
        return {(a["labels"]["alertname"], a["labels"].get("instance", "")) for a in alerts if a["state"] == "firing"}

    def values(self, query: str) -> list[tuple[Mapping[str, str], float]]:
        """The labels and the value of each series of a query's result."""
        return [(each["metric"], float(each["value"][1])) for each in self.get("query", query=query)["result"]]

    def wait(self, what: str, holds: Callable[[Prometheus], bool]) -> None:
        """Return when ``holds`` is true."""
        end = time.monotonic() + DEADLINE
        while not holds(self):
            assert time.monotonic() < end, f"{what}: not within {DEADLINE:.0f} s; firing: {sorted(self.firing())}"
            time.sleep(0.1)


def with_short_times(rules: str, back: int) -> str:
    """The rules with short times: an alert fires at once, and looks back for ``back`` seconds."""
    return re.sub(r"(?m)^( +for: )\w+$", r"\g<1>0s", re.sub(r"\[\d+[mh]\]", f"[{back}s]", rules))


@contextmanager
def scraping(folder: Path, targets: Mapping[str, int], every: int) -> Iterator[Prometheus]:
    """A server that scrapes reporters and evaluates the rules of examples/ with short times.

    :param targets: ports of this host, by the instance that the metrics are to have.
    :param every: seconds between two scrapes, which is also the time that one may take.
    """
    (folder / "nodes.yaml").write_text(with_short_times((RULES / "nodes.yaml").read_text(), 10 * every))
    jobs = {
        "job_name": "trackbed",
        "static_configs": [
            {"targets": [f"127.0.0.1:{port}"], "labels": {"instance": name}} for name, port in targets.items()
        ],
    }
    often = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), f"{every}s")
    with _serving(folder, {"global": often, "rule_files": ["nodes.yaml"], "scrape_configs": [jobs]}) as server:
        yield server


@contextmanager
def remembering(folder: Path, samples: Iterable[str], every: int) -> Iterator[Prometheus]:
    """A server that has scraped nothing itself, and has these samples.

    :param samples: lines of OpenMetrics, with their times.
    :param every: seconds between two samples of a series.
    """
    source = folder / "samples.txt"
    with source.open("w") as file:
        file.writelines(f"{line}\n" for line in (*samples, "# EOF"))
    make = ["tsdb", "create-blocks-from", "openmetrics", "--quiet", str(source), str(folder / "data")]
    subprocess.run([str(program("promtool")), *make], check=True, capture_output=True)
    with _serving(folder, {}, f"--query.lookback-delta={every}s", "--storage.tsdb.retention.time=100y") as server:
        yield server


@contextmanager
def _serving(folder: Path, configuration: Mapping[str, Any], *options: str) -> Iterator[Prometheus]:
    config = folder / "prometheus.yaml"
    config.write_text(yaml.safe_dump(dict(configuration)))
    command = [
        str(program("prometheus")),
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'data'}",
        "--web.listen-address=127.0.0.1:0",
        *options,
    ]
    log = folder / "prometheus.log"
    with log.open("w") as out, subprocess.Popen(command, stderr=out) as process:
        try:
            yield Prometheus(f"http://127.0.0.1:{_port(process, log)}")
        finally:
            process.terminate()


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    end = time.monotonic() + DEADLINE
    # On a busy machine it may be ready before it says where it listens.
    while "Server is ready" not in (text := log.read_text()) or not (port := LISTENS.search(text)):
        assert process.poll() is None, text
        assert time.monotonic() < end, text
        time.sleep(0.05)
    return int(port[1])
