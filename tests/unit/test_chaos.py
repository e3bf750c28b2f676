"""The trials of `python -m tests.chaos`, without a node."""

import http.client
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
import pytest
from attrs import evolve, field, frozen
from click.testing import CliRunner

from agent.report.names import TAINT
from agent.reporter.kubernetes.identity import RENEWED, BoundToken
from agent.reporter.settings import Settings
from lab.cluster.certificates import Authority
from lab.node import wait
from tests.chaos import oracle
from tests.chaos.__main__ import ALL, able, again, main, pick
from tests.chaos.cluster import BAD, forged
from tests.chaos.faults import FAULTS, Fault, Trial, trials
from tests.chaos.lies import CLOCKS, HEARTBEAT, MUTE, PUBLISHING, SAID, Lie, in_api, too_long
from tests.chaos.oracle import EVENTS, SILENT
from tests.chaos.shown import CLAIMS, Seen, claims, longest, shown
from tests.chaos.smallest import smallest
from tests.chaos.trial import OFTEN, RELEASE, difference, of_journal, without
from tests.stand_ins import program, text_file
from tests.unit.reporter.scripted import token_of


def drawn(seed: int, count: int) -> list[Trial]:
    return list(islice(trials(seed, FAULTS), count))


def test_the_same_seed_makes_the_same_trials() -> None:
    assert drawn(7, 200) == drawn(7, 200) != drawn(8, 200)


def test_a_number_of_a_seed_is_the_same_trial_whatever_the_node_can_try() -> None:
    unable = [fault for fault in ALL if fault.needs]
    everything, less = able(trials(7, ALL), 50, []), able(trials(7, ALL), 50, unable)
    assert len(less) == len(everything) == 50
    assert set(less) - set(everything) == {trial for trial in less if trial[0] > 50}
    assert not set(unable) & set(chain.from_iterable(faults for _, faults in less))


def test_a_trial_that_a_node_cannot_try_is_named() -> None:
    fault = Fault("the moon is away", "g", needs="test -e /moon")
    with pytest.raises(click.BadParameter, match=r"trial 1: this node cannot try 'the moon is away' \(needs: test -e"):
        pick([(1, (FAULTS[0], fault))], [1], [], [fault])
    assert pick([(1, (FAULTS[0], fault))], [1], [fault.name], [fault]) == [(1, (FAULTS[0],))]


def test_each_fault_is_tried_before_any_comes_again() -> None:
    firsts = [faults[0].name for _, faults in drawn(1, len(FAULTS))]
    assert sorted(firsts) == sorted(fault.name for fault in FAULTS)
    assert len(set(firsts)) == len(firsts)


def test_a_fault_of_the_host_is_alone() -> None:
    pairs = [faults for _, faults in drawn(1, 500) if len(faults) == 2]
    assert pairs
    assert all(fault.host is None for fault in chain.from_iterable(pairs))


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.name)
def test_each_script_is_valid_shell(fault: Fault) -> None:
    for script in (fault.begin, fault.end, fault.needs):
        assert subprocess.run(["sh", "-n", "-c", script], capture_output=True, check=False).returncode == 0, script


def test_each_fault_has_its_name() -> None:
    assert len({fault.name for fault in ALL}) == len(ALL)


@pytest.mark.parametrize("needed", [[7], [0, 7], [3, 4, 7], [1, 2, 5, 6, 7], list(range(8))])
def test_what_a_failure_does_not_need_is_dropped(needed: list[int]) -> None:
    tried = []

    def fails(steps: Sequence[int]) -> bool:
        tried.append(steps)
        return set(needed) <= set(steps)

    assert smallest(range(8), fails, 100) == needed
    assert all(steps[-1] == 7 for steps in tried)


def test_the_search_for_fewer_faults_ends_after_its_limit_with_the_best_set() -> None:
    calls = []

    def fails(steps: Sequence[int]) -> bool:
        calls.append(steps)
        return {3, 63} <= set(steps)

    kept = smallest(range(64), fails, 5)
    assert len(calls) == 5
    assert {3, 63} <= set(kept)
    assert smallest([9], fails, 5) == [9]


def test_the_command_that_is_printed_picks_the_same_trials() -> None:
    planned = drawn(3, 40)
    number, pair = next(trial for trial in planned if len(trial[1]) == 2)
    needed = [planned[0], (number, pair[:1])]
    command = again(3, (), needed, dict(planned))
    left_out = pair[1].name
    assert f"--trial 1 --trial {number}" in command
    assert left_out in command
    assert pick(planned, [1, number], [left_out], []) == needed


def test_a_traceback_or_a_flood_in_the_journal_is_wrong() -> None:
    assert of_journal("all is well\n" * OFTEN) == []
    assert of_journal("Traceback (most recent call last):\n") == ["the journal has 'Traceback'"]
    [flood] = of_journal("".join(f"gone for {number} s\n" for number in range(OFTEN + 1)))
    assert flood == f"the journal has {OFTEN + 1} times: gone for N s"


def test_no_fault_is_injected_in_a_lab_that_is_down(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKBED_LAB", "x")
    # The paths of pytest's own folders are too long for sockets.
    with TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setenv("XDG_STATE_HOME", folder)
        refused = CliRunner().invoke(main, [])
    assert (refused.exit_code, refused.output) == (1, "Error: lab x is down\n`python -m lab up` starts it.\n")


TRUE, UNTAINTED = CLAIMS


@pytest.mark.parametrize(
    ("line", "made"),
    [
        ("True|\n", {TRUE, UNTAINTED}),
        (f"True|node.kubernetes.io/unreachable {TAINT}\n", {TRUE}),
        ("False|node.kubernetes.io/unreachable\n", {UNTAINTED}),
        (f"Unknown|{TAINT}\n", set()),
        (f"|{TAINT}\n", set()),
    ],
)
def test_a_node_claims_to_be_ready_by_its_condition_and_by_having_no_taint(line: str, made: set[str]) -> None:
    assert claims(line) == made


def test_a_claim_is_shown_until_the_node_changes_or_cannot_be_read() -> None:
    both = frozenset(CLAIMS)
    seen = [Seen(1, both), Seen(2, frozenset({UNTAINTED})), Seen(4), Seen(6, both), Seen(7, both)]
    assert list(shown(TRUE, seen, 9)) == [(1, 2), (6, 9)]
    assert list(shown(UNTAINTED, seen, 9)) == [(1, 4), (6, 9)]
    assert list(shown(TRUE, [], 9)) == []


def test_the_longest_lie_of_the_api_is_the_longest_time_with_both_a_claim_and_a_difference() -> None:
    seen = [Seen(100, frozenset(CLAIMS)), Seen(120, frozenset({UNTAINTED})), Seen(125), Seen(140, frozenset({TRUE}))]
    differed = {EVENTS: [("eth0", 10.0, 13.0), ("eth1", 12.0, 28.0)], SILENT: [("rx-0", 41.0, 60.0)]}
    lies = longest(seen, 150, differed, ahead=100)
    # The taint is absent until 125, by the host's clock, and eth1 differs from 112 to 128.
    assert lies == {EVENTS: Lie(13.0, UNTAINTED, "eth1"), SILENT: Lie(9.0, TRUE, "rx-0")}


def test_there_is_no_lie_if_the_api_says_not_ready_while_the_kernel_differs() -> None:
    seen = [Seen(0, frozenset(CLAIMS)), Seen(10), Seen(20, frozenset(CLAIMS))]
    lies = longest(seen, 30, {EVENTS: [("eth0", 11.0, 19.0)], SILENT: []}, ahead=0)
    assert {kind: lie.seconds for kind, lie in lies.items()} == {EVENTS: 0.0, SILENT: 0.0}


@pytest.mark.parametrize(
    ("fault", "kind", "limit"),
    [
        (Fault("f", "g"), EVENTS, SAID[EVENTS]),
        (Fault("f", "g", silences=True), EVENTS, HEARTBEAT),
        (Fault("f", "g", mutes=True), EVENTS, SAID[EVENTS]),
        (Fault("f", "g"), in_api(EVENTS), SAID[EVENTS] + PUBLISHING + CLOCKS),
        (Fault("f", "g"), in_api(SILENT), SAID[SILENT] + PUBLISHING + CLOCKS),
        (Fault("f", "g", silences=True), in_api(EVENTS), HEARTBEAT + PUBLISHING + CLOCKS),
        (Fault("f", "g", silences=True), SILENT, SAID[SILENT]),
        (Fault("f", "g", mutes=True), in_api(EVENTS), MUTE + PUBLISHING + CLOCKS),
    ],
)
def test_a_lie_is_wrong_if_it_is_longer_than_its_limit(fault: Fault, kind: str, limit: float) -> None:
    other = Fault("other", "g")
    assert too_long({kind: Lie(limit, TRUE, "eth0")}, (other, fault)) == []
    [wrong] = too_long({kind: Lie(limit + 0.1, TRUE, "eth0")}, (other, fault))
    assert wrong == f"{TRUE} for {limit + 0.1:.1f} s while eth0 differed ({kind})"


def test_the_oracle_prints_when_a_value_differed(tmp_path: Path) -> None:
    wanted: dict[str, dict[str, str]] = {"functions": {}, EVENTS: {"gone": "1"}, SILENT: {}}
    (tmp_path / "wanted.json").write_text(json.dumps(wanted))
    began = time.clock_gettime(time.CLOCK_BOOTTIME)
    words = [sys.executable, oracle.__file__, "watch", str(tmp_path / "wanted.json")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as watching:
        wait(lambda: _catches(watching.pid, signal.SIGTERM), 60, "the oracle's start")
        watching.terminate()
        printed = json.loads(watching.communicate()[0])
    [(what, first, last)] = printed["differed"][EVENTS]
    assert what == "gone"
    assert began <= first <= last <= time.clock_gettime(time.CLOCK_BOOTTIME)
    assert printed["differed"][SILENT] == []
    # This host has no report that says ready.
    assert printed["lies"][EVENTS]["seconds"] == 0.0


PF_PCI, VF_PCI = "0000:21:00.0", "0000:21:10.4"


@frozen
class Sysfs:
    """What the oracle reads of a PF and its VF. ``netdevs``: the netdev of each function, by its PCI address."""

    folder: Path
    netdevs: dict[str, str] = field(factory=lambda: {PF_PCI: "ens1f0", VF_PCI: "ens1f0v2"})
    mtu: str = "9000"
    spec: str = f'{{"select": {{"pci": "{PF_PCI}"}}}}'

    def baseline(self) -> dict[str, Any]:
        devices = self.folder / "devices"
        shutil.rmtree(self.folder, ignore_errors=True)
        links = [{"ifname": name, "parentdev": pci, "flags": ["UP"]} for pci, name in self.netdevs.items()]
        program(self.folder / "bin/ip", f"echo '{json.dumps([*links, {'ifname': 'lo'}])}'")
        for pci, name in {PF_PCI: "", VF_PCI: "", **self.netdevs}.items():
            (devices / pci / "msi_irqs" / pci).mkdir(parents=True)
            if name:
                text_file(devices / pci / "net" / name / "queues/rx-0/rps_cpus", "f")
                (devices / pci / "net" / name / "mtu").write_text(self.mtu)
        (devices / PF_PCI / "virtfn0").symlink_to(f"../{VF_PCI}")
        (devices / VF_PCI / "physfn").symlink_to(f"../{PF_PCI}")
        (self.folder / "node.json").write_text(self.spec)
        interrupts = [f"{pci}: 0 PCI-MSI {name}-TxRx-0" for pci, name in self.netdevs.items()]
        (self.folder / "interrupts").write_text("\n".join(["CPU0", *interrupts]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(oracle, "PCI", str(devices))
            patch.setattr(oracle, "INTERRUPTS", str(self.folder / "interrupts"))
            patch.setattr(oracle, "SPEC", str(self.folder / "node.json"))
            patch.setenv("PATH", f"{self.folder}/bin:{os.environ['PATH']}")
            return oracle.baseline()


def test_a_node_may_be_ready_while_a_pf_has_another_name_that_is_not_in_the_spec(tmp_path: Path) -> None:
    node = Sysfs(tmp_path / "sys")
    renamed = evolve(node, netdevs=node.netdevs | {PF_PCI: "other0"})
    # It must have its name at the end, as all that `ip link` prints.
    at_the_end = f"{PF_PCI} netdev ifname: 'ens1f0', now 'other0'"
    assert difference(node.baseline(), renamed.baseline()) == at_the_end
    mtu = f"{PF_PCI} netdev: '0 9000 ', now '0 1500 '"
    assert difference(node.baseline(), evolve(renamed, mtu="1500").baseline()).startswith(mtu)
    by_name = evolve(node, spec='{"select": {"netdev": "ens1f0"}}')
    name = f"{PF_PCI} netdev name: 'ens1f0', now 'not there'"
    assert difference(by_name.baseline(), evolve(by_name, netdevs=renamed.netdevs).baseline()).startswith(name)


def test_a_vf_with_another_name_than_by_its_udev_rule_is_a_difference(tmp_path: Path) -> None:
    node = Sysfs(tmp_path / "sys")
    differs = difference(node.baseline(), evolve(node, netdevs=node.netdevs | {VF_PCI: "other1"}).baseline())
    assert differs.startswith(f"{VF_PCI} netdev name: 'ens1f0v2', now 'other1'")


@pytest.mark.parametrize("pci", [PF_PCI, VF_PCI])
def test_a_lost_netdev_is_a_difference_unless_it_is_left_out(tmp_path: Path, pci: str) -> None:
    node = Sysfs(tmp_path / "sys")
    others = {other: name for other, name in node.netdevs.items() if other != pci}
    before, lost = node.baseline(), evolve(node, netdevs=others).baseline()
    assert f"{pci} netdev: '0 9000 ', now 'not there'" in difference(before, lost)
    left_out = {f"{pci} netdev"}
    assert difference(without(before, left_out), without(lost, left_out)) == (
        f"{pci} netdev-TxRx-0: '', now 'not there'"
    )


def test_a_difference_names_the_value_within_a_link() -> None:
    link = {"flags": ["UP"], "vfinfo_list": [{"vf": 0, "trust": True}, {"vf": 1, "trust": True}]}
    other = link | {"vfinfo_list": [{"vf": 0, "trust": True}, {"vf": 1, "trust": False}]}
    wanted: dict[str, dict[str, object]] = {EVENTS: {"a netdev": "1"}, SILENT: {}, "links": {"b netdev": link}}
    assert difference(wanted, wanted) == ""
    assert difference(wanted, wanted | {"links": {"b netdev": other}}) == (
        "b netdev vfinfo_list 1 trust: True, now False"
    )
    assert difference(wanted, wanted | {EVENTS: {}}) == "a netdev: '1', now 'not there'"


def test_what_the_spec_leaves_to_others_is_not_watched() -> None:
    vf, other = {"0000:01:10.0": "igbvf", "0000:01:10.0 netdev": "1"}, {"0000:01:10.01": "igbvf", "eth2": "1"}
    steering = {"0000:01:10.0 netdev rx-0": "0", "0000:01:10.0 netdev-rx-0": "1"}
    wanted: dict[str, dict[str, str]] = {EVENTS: vf | other, SILENT: steering, "links": {}}
    assert without(wanted, {"0000:01:10.0", ""}) == {EVENTS: other, SILENT: {}, "links": {}}
    kept = {"0000:01:10.0 netdev-rx-0": "1"}
    assert without(wanted, {"0000:01:10.0 netdev"})[SILENT] == kept
    assert without(wanted, {""}) == wanted


def _catches(pid: int, number: signal.Signals) -> bool:
    caught = next(line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) & 1 << (number - 1))


def test_the_reporter_takes_the_token_of_the_fault_for_its_own(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "pki")
    authority.create()
    settings = Settings("node1", "https://127.0.0.1:1", str(authority.pair.certificate))
    (tmp_path / "brought").write_text(forged("node1"))
    (tmp_path / RENEWED).write_text(token_of("node1", issued=time.time() - 60))
    assert BoundToken(settings, tmp_path, tmp_path / "brought").session().token == (tmp_path / "brought").read_text()


@contextmanager
def connected(folder: Path, what: str) -> Iterator[http.client.HTTPSConnection]:
    """A connection with the bad server that does so."""
    authority = Authority(folder)
    authority.create()
    authority.server("kube-apiserver", ("127.0.0.1",))
    [bad] = [bad for bad in BAD if what in bad.what]
    with bad.serving(folder / "server-kube-apiserver.crt") as url:
        context = ssl.create_default_context(cafile=str(authority.pair.certificate))
        yield http.client.HTTPSConnection(url.removeprefix("https://"), context=context, timeout=60)


@pytest.mark.parametrize(("what", "status"), [("429", 429), ("500", 500), ("3 s", 503), ("garbage", 200)])
def test_the_bad_api_server_gives_the_chosen_answer(tmp_path: Path, what: str, status: int) -> None:
    with connected(tmp_path, what) as connection:
        connection.request("PATCH", "/api/v1/nodes/n/status", body="{}")
        answer = connection.getresponse()
        assert answer.status == status
        assert (b"Status" in answer.read()) is (what != "garbage")


def test_the_bad_api_server_cuts_connections_or_does_not_answer(tmp_path: Path) -> None:
    with connected(tmp_path, "cuts") as connection:
        connection.request("GET", "/")
        with pytest.raises(http.client.IncompleteRead):
            connection.getresponse().read()
    with connected(tmp_path, "nothing") as connection:
        connection.request("GET", "/")
        connection.sock.settimeout(1.0)
        with pytest.raises(TimeoutError):
            connection.getresponse()
        silent = connection.sock
    # It ends with the fault.
    silent.settimeout(60)
    assert silent.recv(1) == b""


def test_a_vf_that_was_released_before_can_be_released_again() -> None:
    # Run as a trial runs it on a node (`sh -e`). This host has no network namespace "pod", like a node after a release.
    subprocess.run(["sh", "-euc", RELEASE], check=True)
