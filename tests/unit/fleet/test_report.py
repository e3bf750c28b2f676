"""`trackbed fleet report`: the page of a day that a real Prometheus has stored, in a real browser."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from attrs import evolve
from click.testing import CliRunner, Result
from matplotlib import colormaps
from matplotlib.colors import to_hex

from cli.__main__ import cli
from fleet.last_deploy import LastDeploy, Operation, default_path, write
from fleet.page import POLICY
from fleet.report.history import History, NodeCourse, read_history
from fleet.report.page import page
from fleet.report.pictures import KINDS, LONGEST, NOT_READY, READY, SILENT
from fleet.report.prometheus import connected
from tests.chromium import Scheme, illegible, shown
from tests.fleet_samples import BROKEN, DRIFTING, EVERY, FLAPPING, POINTS, name, samples
from tests.fleet_samples import SILENT as SILENT_NODE
from tests.prometheus_server import Prometheus, remembering
from tests.unit.fleet.test_kubeconfig import server

pytestmark = pytest.mark.slow

END = int(time.time())

LINKS = to_hex(colormaps[KINDS](0))
"""The colour of repairs of links, the most frequent kind."""

DEPLOY = LastDeploy(
    ("inventories/prod.py", "deploy.py"),
    1.79e9,
    1.79e9 + 700,
    (Operation("OFED: <build>", 8, 412.0, 301.0, "gpu-0004"), Operation("Packages", 8, 180.0, 40.0, "gpu-0001")),
    {"gpu-0004": 592.0, "gpu-0001": 420.5},
)


@pytest.fixture(scope="module")
def eight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with remembering(tmp_path_factory.mktemp("eight"), samples(8, END), EVERY) as server:
        yield server


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    with remembering(tmp_path_factory.mktemp("many"), samples(512, END), EVERY) as server:
        yield server


@pytest.fixture(autouse=True)
def deployed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    write(default_path(), DEPLOY)
    # The samples end at END, however long the tests before this one took.
    monkeypatch.setattr("fleet.commands.report.time", SimpleNamespace(time=lambda: END))


def report(server: str, *more: str) -> Result:
    return CliRunner().invoke(cli, ["fleet", "report", "--prometheus", server, *more])


def history(server: Prometheus, end: int = END) -> History:
    with connected(server.url, 24, end) as prometheus:
        return read_history(prometheus)


def test_each_node_has_the_share_of_the_day_for_which_it_was_ready(eight: Prometheus) -> None:
    fleet_history = history(eight)
    assert {node for node, ready in fleet_history.is_ready.items() if not ready} == {name(BROKEN), name(SILENT_NODE)}
    assert fleet_history.shares[name(0)] == 1
    assert fleet_history.shares[name(BROKEN)] == pytest.approx(1 / 2, abs=0.02)
    # No answer is not ready.
    assert fleet_history.shares[name(SILENT_NODE)] == pytest.approx(1 / 3, abs=0.02)
    assert fleet_history.shares[name(FLAPPING)] == pytest.approx(23 / 24, abs=0.02)


def test_the_course_of_the_fleet_adds_up_to_its_nodes(eight: Prometheus) -> None:
    fleet_history = history(eight)
    courses = {course.name: course for course in fleet_history.courses}
    assert courses.keys() == fleet_history.shares.keys()
    for point, (ready, silent) in enumerate(zip(fleet_history.ready, fleet_history.silent, strict=True)):
        assert ready == pytest.approx(sum(course.ready[point] or 0 for course in fleet_history.courses))
        assert silent == pytest.approx(sum(course.silent[point] or 0 for course in fleet_history.courses))
    # In the afternoon. In the step before this one, the node that flaps was not ready for a third or a quarter of it:
    # whether the sample at a step's begin belongs to it differs between Prometheus 2 and 3.
    point = len(fleet_history.times) * 3 // 4 + 1
    assert [fleet_history.ready[point], fleet_history.silent[point], fleet_history.nodes[point]] == pytest.approx(
        [6, 1, 8]
    )
    assert courses[name(BROKEN)].ready[point] == 0
    assert courses[name(SILENT_NODE)].silent[point] == 1
    assert courses[name(FLAPPING)].ready[point - 1] in (pytest.approx(2 / 3), pytest.approx(3 / 4))


def test_repairs_are_counted_by_what_was_repaired_and_where(eight: Prometheus) -> None:
    fleet_history = history(eight)
    assert fleet_history.repaired == {"links": (23, 1), "vfs": (5, 1)}
    assert fleet_history.suspects == {"links": {"NetworkManager": 23}}
    # Wherever the scrapes are in a step.
    for each in (fleet_history, history(eight, END + EVERY // 3)):
        assert sum(value or 0 for value in each.repairs["links"]) == 23
        assert sum(value or 0 for value in each.repairs["vfs"]) == 5
    assert [(each.node, each.kind, each.times) for each in fleet_history.most_repaired] == [
        (name(DRIFTING), "links", 23),
        (name(DRIFTING), "vfs", 5),
    ]
    assert fleet_history.contended == (name(DRIFTING),)
    assert fleet_history.versions == {"0.2.0": 6, "0.1.0": 2}


def test_repairs_that_two_servers_have_scraped_count_once(eight: Prometheus, tmp_path: Path) -> None:
    """prometheus 7123: of two servers that scrape the same nodes, a third one has all series, each with another label."""
    both = [
        line.replace("{", f'{{prometheus_replica="{replica}",')
        for line in samples(8, END)
        for replica in ("ab" if "{" in line else "a")
    ]
    with remembering(tmp_path, both, EVERY) as server:
        twice = history(server)
    once = history(eight)
    assert (twice.shares, twice.is_ready, twice.versions) == (once.shares, once.is_ready, once.versions)
    for each in ("repairs", "repaired", "suspects", "most_repaired"):
        assert getattr(twice, each) == getattr(once, each), each


def lies(instance: str, end: int) -> Iterator[str]:
    """What root on a node may answer a scrape with: numbers that are none, no labels or too many, a series named up."""
    of = f'job="trackbed",instance="{instance}"'
    # A counter that falls all day.
    for number in range(POINTS):
        yield f'trackbed_drift_repairs_total{{{of},kind="links",more="1"}} {-number} {end - (POINTS - 1 - number) * EVERY}'
    for number in range(3):
        when = end - (2 - number) * EVERY
        yield f"up{{{of}}} 1 {when}"
        yield f'up{{{of},more="1"}} -1e9 {when}'
        yield f"trackbed_ready{{{of}}} {('NaN', '1e9', '+Inf')[number]} {when}"
        for more in range(3):
            labels = f'{of},more="{more}",type="NicsPresent",status="False",severity="required"'
            yield f"trackbed_condition{{{labels}}} 1 {when}"
        yield f"trackbed_condition{{{of}}} 1 {when}"
        for kind, values in (("links", (0, 1, "+Inf")), ("vfs", (0, 5, "NaN")), ("rps", (0, 1, "1e300"))):
            yield f'trackbed_drift_repairs_total{{{of},kind="{kind}"}} {values[number]} {when}'
        yield f"trackbed_drift_repairs_total{{{of}}} {number} {when}"
        suspect = f'trackbed_drift_suspects_total{{{of},kind="links"'
        yield f"{suspect}}} {number} {when}"
        yield f'{suspect},program="NetworkManager"}} {(0, 1, "+Inf")[number]} {when}'
        yield f"trackbed_build_info{{{of}}} 1 {when}"
        yield f'trackbed_build_info{{{of},version="0.1.0",more="1"}} 1 {when}'
        yield f'trackbed_build_info{{{of},version="0.1.0",more="2"}} 1 {when}'
        yield f"trackbed_spec_info{{{of}}} 1 {when}"


def test_a_node_that_answers_with_lies_changes_only_its_own_part(eight: Prometheus, tmp_path: Path) -> None:
    honest, liar = history(eight), "gpu-0009.example.net:9809"
    with remembering(tmp_path, [*samples(8, END), *lies(liar, END)], EVERY) as server:
        told = history(server)
        page = tmp_path / "fleet.html"
        said = report(server.url, "--html", str(page))
    assert said.output == f"6 of 9 nodes are ready; the page is {page}\n"
    assert told.is_ready == {**honest.is_ready, liar: False}
    assert told.shares == {**honest.shares, liar: told.shares[liar]}
    assert 0 <= told.shares[liar] <= 1
    for point, nodes in enumerate(honest.nodes):
        assert told.nodes[point] in (nodes, (nodes or 0) + 1), point
        for one, other in ((told.ready, honest.ready), (told.silent, honest.silent)):
            # Prometheus may add the nodes up in another order.
            assert -1e-9 <= (one[point] or 0) - (other[point] or 0) <= 1 + 1e-9, point
    assert [(each.type, each.nodes) for each in told.faulty] == [("NicsPresent", 2), ("Uncontended", 1)]
    assert {kind: told.repaired[kind][0] for kind in honest.repaired} == {"links": 23, "vfs": 5}
    assert {kind: sum(value or 0 for value in told.repairs[kind]) for kind in honest.repairs} == {"links": 23, "vfs": 5}
    assert told.suspects == honest.suspects
    assert told.versions == {"0.2.0": 6, "0.1.0": 3}
    assert told.specs == honest.specs


def test_of_a_large_fleet_only_nodes_that_were_not_ready_have_a_course(many: Prometheus) -> None:
    fleet_history = history(many)
    assert len(fleet_history.shares) == 512
    assert {course.name for course in fleet_history.courses} == {
        name(64 * group + one) for group in range(8) for one in (BROKEN, SILENT_NODE, FLAPPING)
    }


def written(server: Prometheus, folder: Path) -> Path:
    """The page of the fleet's day."""
    path = folder / "fleet.html"
    said = report(server.url, "--html", str(path))
    assert said.exit_code == 0, said.output
    return path


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("fleet", ["eight", "many"])
def test_a_browser_shows_the_whole_page_legibly_and_makes_no_request(
    fleet: str, scheme: Scheme, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    page = written(request.getfixturevalue(fleet), tmp_path)
    assert illegible(page, scheme, tmp_path) == []
    seen = shown(page, scheme, tmp_path)
    assert seen.asked == frozenset()
    paper = {"light": "#ffffff", "dark": "#16181c"}
    assert {READY, NOT_READY, SILENT, LINKS, paper[scheme]} <= seen.colours()
    assert paper["dark" if scheme == "light" else "light"] not in seen.colours()


def test_long_names_can_be_read(eight: Prometheus, tmp_path: Path) -> None:
    host = "gpu-0004.rack-17.hall-2.example.net"
    operation = Operation("OFED | Packages from a repository of the vendor's", 8, 412.0, 301.0, host)
    write(default_path(), evolve(DEPLOY, operations=(operation, *DEPLOY.operations)))
    page = written(eight, tmp_path)
    assert host in page.read_text()
    assert illegible(page, "light", tmp_path) == []


def test_a_page_that_cannot_be_read_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    picture = '<svg width="90" height="20" viewBox="0 0 180 40" font-size="20">'
    page.write_text(
        '<body style="background: #fff"><p style="color: #999">pale</p><p style="width: 1300px">wide</p>'
        f'{picture}<text y="20">one</text><text x="9" y="20">two</text></svg>'
        f'{picture}<text x="170" y="20">out</text></svg>{picture}<text y="20" font-size="16">tiny</text></svg></body>'
    )
    assert illegible(page, "light", tmp_path) == [
        "the page is 1308 pixels wide",
        "'pale' has a contrast of 2.8",
        "'out' is not all in its picture",
        "'tiny' is 8.0 pixels high",
        "'one' is over 'two'",
    ]


def test_a_page_that_makes_a_request_is_noticed(tmp_path: Path) -> None:
    page = tmp_path / "fleet.html"
    page.write_text('<img src="http://127.0.0.1:9/image">')
    assert shown(page, "light", tmp_path).asked == {"http://127.0.0.1:9/image"}


def test_the_page_says_what_the_pictures_show(eight: Prometheus, tmp_path: Path) -> None:
    page = tmp_path / "fleet.html"
    said = report(eight.url, "--html", str(page))
    assert said.output == f"6 of 8 nodes are ready; the page is {page}\n"
    text = page.read_text()
    assert f'content="{POLICY}"' in text and "default-src 'none'" in POLICY
    # Names of XML's vocabularies are no addresses that anything is fetched from.
    assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text).replace("http-equiv", "")
    words = re.sub(r"<[^>]+>", " ", text)
    for said_of in (
        "5 of 8 nodes were ready all the time",
        "gpu-0004.example.net",
        "links 23, vfs 5",
        "NetworkManager 23",
        "none of the known programs",
        "6 min 52 s, gpu-0004",
    ):
        assert said_of in words, said_of
    # What has a name that looks like HTML is text.
    assert "<build>" not in text and "OFED: &lt;build&gt;" in text


def test_a_name_is_not_drawn_as_a_formula_and_may_be_long(tmp_path: Path) -> None:
    name, nothing = f"{'gpu' * 80}$\\frac{{$", LastDeploy((), 0, 0, (Operation("echo $A ${B}", 1, 1.0, 1.0, "n1"),), {})
    course = NodeCourse(name, (1.0, 0.0), (0.0, 0.0))
    once = History(
        times=(0, 60), ready=(1.0, 0.0), silent=(0.0, 0.0), nodes=(1.0, 1.0), is_ready={name: False}, shares={name: 0.5},
        courses=(course,), faulty=(), repairs={}, repaired={}, suspects={}, most_repaired=(), contended=(),
        versions={}, specs={},
    )  # fmt: skip
    text = page(once, nothing)
    assert ">echo $A ${B}</text>" in text
    assert f">{name[: LONGEST - 1]}…</text>" in text


def test_a_page_without_a_deploy_says_so(eight: Prometheus, tmp_path: Path) -> None:
    default_path().unlink()
    assert "None was made from this control host." in written(eight, tmp_path).read_text()


def test_json_has_what_the_page_shows(eight: Prometheus) -> None:
    said = json.loads(report(eight.url, "--json").output)
    assert said["history"]["repaired"]["links"] == [23, 1]
    assert said["deploy"]["operations"][0]["slowest"] == "gpu-0004"


@pytest.mark.parametrize(
    "url", ["user:secret@h:9090", "ftp://user:secret@h", "http://user:secret@h:9x", "http://user:secret#pw@h:90", "h:9090"]
)  # fmt: skip
def test_what_is_no_url_of_a_server_is_refused_without_its_password(url: str) -> None:
    done = report(url)
    assert done.exit_code == 1
    assert done.output.endswith(" is no URL of a Prometheus; give one as http://HOST:9090\n")
    assert "secret" not in done.output


def test_a_login_is_read_from_netrc_and_is_not_in_the_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    remedy = "write it into ~/.netrc, readable by you alone: machine 127.0.0.1 login USER password PASSWORD"
    shown = report("http://user:secret@127.0.0.1:9/")
    assert (shown.exit_code, "secret" in shown.output) == (1, False)
    assert f"has a login, which other users see; {remedy}" in shown.output
    with server("no", status=401) as (url, sent):
        asked = report(url)
        assert asked.exit_code == 1
        assert f"{url} asks for a login, or does not accept the given one; {remedy}" in asked.output
        netrc = tmp_path / ".netrc"
        netrc.write_text("machine 127.0.0.1 login user password secret\n")
        netrc.chmod(0o600)
        assert report(url).exit_code == 1
        assert sent == [None, "Basic dXNlcjpzZWNyZXQ="]
        netrc.chmod(0o644)
        unusable = report(url).output
    assert f"{url} asks for a login" in unusable and "~/.netrc cannot be used: " in unusable and "permissi" in unusable


def test_a_netrc_that_cannot_be_used_matters_only_if_a_login_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other programs, such as curl, read it, too, and accept more."""
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".netrc").write_text("machine\n")
    empty = json.dumps({"status": "success", "data": {"result": []}})
    with server(empty) as (url, _):
        assert "it needs a job trackbed" in report(url).output


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("HTTP_PROXY", "http://proxy:x", "a proxy of the environment (HTTP_PROXY) cannot be used (InvalidURL)"),
        ("ALL_PROXY", "ftp://proxy", "a proxy of the environment (ALL_PROXY) cannot be used (ValueError)"),
        ("SSL_CERT_FILE", "/nonexistent", "SSL_CERT_FILE cannot be read"),
    ],
)
def test_what_the_environment_gives_and_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str, message: str
) -> None:
    monkeypatch.setenv(variable, value)
    done = report("http://127.0.0.1:1")
    assert (done.exit_code, message in done.output) == (1, True)


def test_a_url_that_is_no_prometheus_with_nodes_gives_one_message(eight: Prometheus, tmp_path: Path) -> None:
    closed = report("http://127.0.0.1:9/")
    assert closed.exit_code == 1
    assert "http://127.0.0.1:9 does not answer" in closed.output
    other = report(f"{eight.url}/graph")
    assert other.exit_code == 1
    assert "is it a Prometheus?" in other.output
    with remembering(tmp_path, ["# TYPE up gauge", f'up{{job="other"}} 1 {END}'], EVERY) as empty:
        none = report(empty.url)
    assert none.exit_code == 1
    assert "it needs a job trackbed" in none.output
    assert report("nonsense").exit_code == 1


@pytest.mark.parametrize("end", [1_800_000_000, 1_800_000_123, 1_800_000_450, 1_800_000_899])
def test_points_that_a_query_frontend_has_moved_count_for_the_next_ones(end: int) -> None:
    # Thanos answers for multiples of the step.
    moved = [[(end - 900 * left) // 900 * 900, "1"] for left in reversed(range(96))]
    body = json.dumps({"status": "success", "data": {"result": [{"metric": {"a": "b"}, "values": moved}]}})
    with server(body) as (url, _), connected(url, 24.0, end) as prometheus:
        ((labels, course),) = prometheus.over_time("up")
    assert (labels, course) == ({"a": "b"}, [1.0] * 96)
