"""The metrics, rules and dashboard in a real Prometheus."""

import json
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from attrs import evolve, frozen
from prometheus_client.parser import text_string_to_metric_families

from agent.report import drift, names
from agent.report.drift import Counts
from agent.report.records import Change, Condition, NicVerdict, Outcome, Report, report_to_json
from agent.report.verdict import Verdict
from agent.reporter.http.metrics import render
from agent.runtime import boot_id, uptime
from tests.programs import success
from tests.prometheus_server import ROOT, RULES, Prometheus, program, scraping

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parent / "prometheus"

# The reporter as its unit runs it, but for the folder of the agent's files.
REPORTER = """
import sys
from pathlib import Path
from cli.__main__ import cli
from cli import node_files
node_files.RUN = Path(sys.argv[1])
cli(["reporter", "--listen", "127.0.0.1:0"])
"""

READY = Report(
    "n1",
    "h1",
    "b1",
    "v1",
    ready=True,
    up_to_date=True,
    generation=3,
    heartbeat=1.8e9,
    conditions=(
        Condition("NicsPresent", "True", "AllPresent"),
        Condition("ClockSynchronised", "True", "Synchronised", severity="warn"),
    ),
    outcomes=(Outcome(Change("links", "0000:21:00.0", "mtu", 1500, 9000), "applied"),),
    nics=(NicVerdict("rail0", "0000:21:00.0", True, True),),
)
MISSING = (Condition("NicsPresent", "False", "NicMissing", "rail0 is missing"), READY.conditions[1])
COUNTS = Counts(Counter(links=3, vfs=0), Counter({("links", "NetworkManager"): 3}))


def repaired(**more: int) -> Counts:
    """The counts after more repairs of some kinds, all while NetworkManager ran."""
    repairs = Counter({kind: count + more.get(kind, 0) for kind, count in COUNTS.repairs.items()})
    return Counts(repairs, Counter({("links", "NetworkManager"): repairs["links"]}))


def promtool(*words: str | Path, text: str | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(word) for word in (program("promtool"), *words)]
    return subprocess.run(command, input=text, capture_output=True, text=True, check=False)


def metrics() -> str:
    """What the reporter serves of a node that has everything."""
    return render(Verdict(READY, (), fresh=True), COUNTS, "")[0].decode()


def test_a_version_that_is_none_gets_the_text_form() -> None:
    text, kind = render(Verdict(READY, (), fresh=True), COUNTS, "application/openmetrics-text; version=abc")
    assert kind.startswith("text/plain")
    assert text.decode() == metrics()


def served() -> set[str]:
    """The names of the reporter's series."""
    return {sample.name for family in text_string_to_metric_families(metrics()) for sample in family.samples}


def asked(expression: str) -> set[str]:
    """The names of the metrics in an expression: what is left without labels, ranges, functions and keywords."""
    bare = re.sub(r"\{[^}]*\}|\[[^]]*\]|\b(?:by|on|without) *\([^)]*\)", " ", expression)
    return set(re.findall(r"\b[a-z][a-z0-9_:]*\b(?! *\()", bare)) - {"and", "or", "unless", "bool", "e"}


def dashboard() -> str:
    """The dashboard. It is made on control hosts, which have Python 3.11 or later; its library needs that."""
    return str(pytest.importorskip("fleet.dashboard", exc_type=ImportError).dashboard())


def queries() -> dict[str, list[str]]:
    """The expressions of the dashboard's panels, by title."""
    shown = json.loads(dashboard())
    return {panel["title"]: [target["expr"] for target in panel.get("targets", ())] for panel in shown["panels"]}


def rules(name: str) -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load((RULES / name).read_text())["groups"] for rule in group["rules"]]


@frozen
class Reporter:
    """A running reporter, and the folder of the files that it serves."""

    run: Path
    port: int

    def say(self, report: Report, counts: Counts) -> None:
        """Replace the files as the agent does."""
        stamped = evolve(report, boot_id=boot_id(), uptime=uptime())
        for name, text in ((drift.NAME, drift.to_json(counts)), (names.REPORT, report_to_json(stamped))):
            new = self.run / f".{name}.new"
            new.write_text(text)
            new.replace(self.run / name)


@pytest.fixture(scope="module")
def reporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reporter]:
    run = tmp_path_factory.mktemp("run")
    command = [sys.executable, "-c", REPORTER, str(run)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stderr is not None
        said = re.search(r"on port (\d+)", process.stderr.readline())
        assert said is not None
        yield Reporter(run, int(said[1]))
        process.terminate()


@pytest.fixture(scope="module")
def prometheus(reporter: Reporter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    reporter.say(READY, COUNTS)
    with scraping(tmp_path_factory.mktemp("prometheus"), {"n1": reporter.port}, every=1) as server:
        yield server


def test_the_metrics_follow_the_conventions() -> None:
    checked = promtool("check", "metrics", text=metrics())
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.parametrize("name", sorted(path.name for path in TESTS.iterdir()))
def test_the_rules_fire_and_resolve_as_their_tests_say(name: str) -> None:
    assert promtool("check", "rules", RULES / name).returncode == 0
    success(promtool("test", "rules", TESTS / name))


@pytest.mark.parametrize("name", ["nodes.yaml", "cluster.yaml"])
def test_each_alert_is_tested_firing_and_not(name: str) -> None:
    tests = yaml.safe_load((TESTS / name).read_text())["tests"]
    asked = [alert for test in tests for alert in test["alert_rule_test"]]
    alerts = {rule["alert"] for rule in rules(name) if "alert" in rule}
    assert alerts == {alert["alertname"] for alert in asked if alert.get("exp_alerts")}
    assert alerts == {alert["alertname"] for alert in asked if not alert.get("exp_alerts")}


@pytest.mark.parametrize("name", ["nodes.yaml", "cluster.yaml"])
def test_each_recorded_series_is_tested(name: str) -> None:
    tests = yaml.safe_load((TESTS / name).read_text())["tests"]
    asked = {case["expr"] for test in tests for case in test.get("promql_expr_test", ()) if case["exp_samples"]}
    recorded = {rule["record"] for rule in rules(name) if "record" in rule}
    assert recorded and recorded == asked


def test_the_example_configuration_is_valid_and_has_the_job_that_the_rules_name() -> None:
    example = RULES / "prometheus.yaml"
    success(promtool("check", "config", "--syntax-only", example))
    document = yaml.safe_load(example.read_text())
    assert [job["job_name"] for job in document["scrape_configs"]] == ["trackbed"]
    assert all((RULES / name).is_file() for name in document["rule_files"])


def test_the_rules_ask_for_metrics_that_there_are() -> None:
    recorded = {rule["record"] for rule in rules("nodes.yaml") if "record" in rule}
    expressions = [rule["expr"] for rule in rules("nodes.yaml")]
    assert set[str]().union(*map(asked, expressions)) <= served() | recorded | {"up"}


def test_the_dashboard_shows_each_metric_and_no_other() -> None:
    expressions = [expression for each in queries().values() for expression in each]
    assert set[str]().union(*map(asked, expressions)) == served() | {"up"}
    (chosen,) = (v for v in json.loads(dashboard())["templating"]["list"] if v["name"] == "instance")
    assert re.findall(r"trackbed_\w+", chosen["query"]) == ["trackbed_ready"]


def test_each_panel_shows_a_node_that_has_every_fault(reporter: Reporter, prometheus: Prometheus) -> None:
    failed = (Outcome(Change("links", "0000:21:00.0", "mtu", 1500, 9000), "failed", "EBUSY"),)
    nics = (NicVerdict("rail0", "0000:21:00.0", True, False, "Quarantined", link="quarantined"),)
    faulty = evolve(READY, ready=False, up_to_date=False, conditions=MISSING, outcomes=failed, nics=nics)
    rows = [title for title, expressions in queries().items() if not expressions]
    assert rows == ["The fleet", "The chosen nodes"]
    for number, (title, expressions) in enumerate(queries().items()):
        reporter.say(faulty, repaired(links=number))
        for expression in expressions:
            written = re.sub(r"\$__(?:rate_interval|range)", "15s", expression).replace("$instance", ".*")
            prometheus.wait(f"data for {title}: {written}", lambda p, query=written: bool(p.values(query)))  # type: ignore[misc]


def test_the_dashboard_counts_a_node_once_whatever_it_answers(tmp_path: Path) -> None:
    labels = 'job="trackbed",instance="a"'
    series = {f"up{{{labels}}}": "1", f'up{{{labels},x="1"}}': "1", f'up{{{labels},x="2"}}': "NaN"}
    series |= {f"trackbed_ready{{{labels}}}": "1", 'up{job="trackbed",instance="b"}': "0"}
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": f"{value} {value}"} for name, value in series.items()],
        "promql_expr_test": [
            {"expr": queries()[title][0], "eval_time": "1m", "exp_samples": [{"labels": "{}", "value": value}]}
            for title, value in (("Nodes that are ready", 0.5), ("Nodes", 2))
        ],
    }
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"tests": [test]}))
    success(promtool("test", "rules", tmp_path / "test.yaml"))


def test_the_dashboard_is_made_by_its_command() -> None:
    expected = dashboard()
    printed = subprocess.run(
        [sys.executable, "-m", "fleet.dashboard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert printed.stdout == expected + "\n"


def test_the_cluster_rules_have_the_names_that_the_reporter_writes() -> None:
    text = (RULES / "cluster.yaml").read_text()
    assert set(re.findall(r'condition="(\w+)"', text)) == {names.READY, names.UP_TO_DATE}
    assert set(re.findall(r'key="([^"]+)"', text)) == {names.TAINT}
    assert set(re.findall(r'namespace="([^"]+)"', text)) == {names.NAMESPACE}
    assert f"> {names.LEASE_DURATION}\n" in text


def test_an_alert_fires_and_resolves_as_the_report_changes(reporter: Reporter, prometheus: Prometheus) -> None:
    not_ready = ("TrackbedNodeNotReady", "n1")
    reporter.say(READY, COUNTS)
    prometheus.wait("a ready node", lambda p: [v for _, v in p.values("trackbed_ready")] == [1.0])
    prometheus.wait("no alert", lambda p: not_ready not in p.firing())
    reporter.say(evolve(READY, ready=False, conditions=MISSING), COUNTS)
    prometheus.wait("the alert", lambda p: not_ready in p.firing())
    (alert,) = (a for a in prometheus.get("alerts")["alerts"] if a["labels"]["alertname"] == not_ready[0])
    assert "NicsPresent is False" in alert["annotations"]["description"]
    reporter.say(READY, COUNTS)
    prometheus.wait("its end", lambda p: not_ready not in p.firing())


def test_vfs_repaired_before_the_next_scrape_are_an_alert(reporter: Reporter, prometheus: Prometheus) -> None:
    deleted = ("TrackbedVfsDeleted", "n1")
    reporter.say(READY, COUNTS)
    query = 'trackbed_drift_repairs_total{kind="vfs"}'
    prometheus.wait("a first scrape", lambda p: [v for _, v in p.values(query)] == [0.0])
    assert deleted not in prometheus.firing()
    reporter.say(READY, repaired(vfs=1))
    prometheus.wait("the alert", lambda p: deleted in p.firing())
    prometheus.wait("its end", lambda p: deleted not in p.firing())
