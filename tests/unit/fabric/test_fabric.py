"""The fabric test without a fabric: which NICs are tested with each other, and which are blamed."""

from collections import Counter

import pytest
from attrs import evolve

from fleet.fabric.ends import End, by_name
from fleet.fabric.results import FabricResult, measured
from fleet.fabric.schedule import ALL_PAIRS, Round, survey
from fleet.fabric.tests import TESTS, FabricSettings, client, server
from fleet.fabric.verdict import Verdict, verdict
from tests.sim.fabric import Fabric, Kind, ends, some_bad

WRITE = (("ib_write_bw", True),)
ONE_RAIL = FabricSettings(across_rails=False)


def judge(fabric: Fabric, settings: FabricSettings = ONE_RAIL) -> Verdict:
    _, results = fabric.run(settings)
    return verdict(fabric.ends, results, True)


def blamed(said: Verdict) -> dict[str, tuple[str, str]]:
    return {each.end: (each.status, each.kind) for each in said.ends if each.status != "good"}


@pytest.mark.parametrize(("nodes", "rails"), [(2, 1), (3, 2), (7, 3), (8, 8), (33, 2), (100, 3)])
def test_no_nic_is_in_two_tests_of_a_round_and_none_is_tested_with_its_own_node(nodes: int, rails: int) -> None:
    all_ends = ends(nodes, rails)
    rounds = survey(all_ends, WRITE, True, 1)
    for each in rounds:
        used = Counter(name for pair in each.pairs for name in pair)
        assert max(used.values()) == 1
        assert all(all_ends[one].node != all_ends[other].node for one, other in each.pairs)
        assert all((all_ends[one].rail != all_ends[other].rail) == each.across for one, other in each.pairs)


@pytest.mark.parametrize(("nodes", "rails"), [(2, 1), (3, 2), (6, 3), (9, 4)])
def test_of_a_small_fleet_all_pairs_are_tested_once_in_each_direction(nodes: int, rails: int) -> None:
    all_ends = ends(nodes, rails)
    tested = Counter(pair for each in survey(all_ends, WRITE, True, 1) for pair in each.pairs)
    assert set(tested.values()) == {1}
    assert len(tested) == (nodes * rails) * (nodes - 1) * rails


def test_the_number_of_rounds_does_not_grow_with_a_large_fleet() -> None:
    counts = {len(survey(ends(nodes, 4), WRITE, True, 1)) for nodes in (ALL_PAIRS + 1, 200, 2000)}
    assert len(counts) == 1


def test_the_same_seed_gives_the_same_rounds_and_another_one_others() -> None:
    all_ends = ends(50, 2)
    assert survey(all_ends, WRITE, True, 3) == survey(all_ends, WRITE, True, 3) != survey(all_ends, WRITE, True, 4)


def test_servers_and_clients_are_pinned_and_use_the_gid_that_was_found() -> None:
    one = End("a", "fab0", 0, "x", device="mlx5_0", address="10.0.0.1", gid_index=5, cpus="0-3,8", gpu="0000:3b:00.0")
    other = evolve(
        one, node="b", source_option="--bind_source_ip", device="mlx5_4", address="10.0.0.2", gid_index=None, cpus=""
    )
    read, send, late = TESTS["ib_read_bw"], TESTS["ib_send_bw"], TESTS["ib_write_lat"]
    load = FabricSettings(seconds=5, size=4096, messages=100, gpu_memory=True)
    common = ("-d", "mlx5_0", "-i", "1", "-p", "18515", "-F")
    pinned = ("taskset", "-c", "0-3,8")
    assert server(read, one, 18515, evolve(load, gpu_memory=False)) == (
        *pinned, "ib_read_bw", *common, "-q", "30", "-x", "5", "--report_gbits", "-s", "4096", "-D", "5",
    )  # fmt: skip
    assert client(send, one, other, 18515, load) == (
        *pinned, "ib_send_bw", *common, "-R", "--report_gbits", "-s", "4096", "-D", "5",
        "--use_cuda_bus_id=0000:3b:00.0", "--source_ip", "10.0.0.1", "10.0.0.2",
    )  # fmt: skip
    assert client(send, other, one, 7, load)[-3:] == ("--bind_source_ip", "10.0.0.2", "10.0.0.1")
    assert client(late, other, one, 7, load) == (
        "ib_write_lat", "-d", "mlx5_4", "-i", "1", "-p", "7", "-F", "-n", "100", "10.0.0.1",
    )  # fmt: skip


def test_both_sides_connect_by_ipv6_if_the_server_has_no_other_address() -> None:
    one = End("a", "fab0", 0, "x", device="mlx5_0", address="fd00::1", gid_index=3)
    other = evolve(one, node="b", address="fd00::2", source_option="--bind_source_ip")
    for test in (TESTS["ib_write_bw"], TESTS["ib_send_bw"]):
        assert "--ipv6-addr" in server(test, one, 18515, FabricSettings())
        assert "--ipv6-addr" in client(test, other, one, 18515, FabricSettings())


# perftest 4.5's formats: RESULT_FMT_G and REPORT_FMT, RESULT_FMT_LAT and REPORT_FMT_LAT of perftest_parameters.h.
RATE = """\
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : rocep33s0f0v0
 Mtu             : 4096[B]
 GID index       : 1
---------------------------------------------------------------------------------------
 local address: LID 0000 QPN 0x0011 PSN 0xf22a3b RKey 0x00030c VAddr 0x007f1d6f6d1000
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:10:10:00:01
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      664644           0.00               110.52 \t\t   0.210801
---------------------------------------------------------------------------------------
"""
LATENCY = """\
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec] 
 2       1000          1.79           7.51         1.83     \t       1.86        \t0.11   \t\t2.00    \t\t7.51   
---------------------------------------------------------------------------------------
"""  # noqa: E501, W291
STATUS_12 = """\
 Completion with error at client
 Failed status 12: wr_id 0 syndrom 0x0
scnt=128, ccnt=0
"""


def outcome(test: str, code: int, output: str) -> FabricResult:
    return measured(Round("survey", 0, test, False, (("s", "c"),)), "s", "c", code, output, FabricSettings(seconds=5))


def test_results_are_read_from_what_perftest_prints() -> None:
    assert outcome("ib_write_bw", 0, RATE).value == 110.52
    assert outcome("ib_write_lat", 0, LATENCY).value == 1.83
    # Without --report_gbits perftest would print megabytes.
    assert outcome("ib_write_bw", 0, RATE.replace("Gb/sec", "MB/sec")).fault == "output"
    no_rate = RATE.replace("110.52", "0.00").replace("0.210801", "0.000000")
    nothing = no_rate.replace("664644", "0     ")
    assert outcome("ib_write_bw", 0, nothing).fault == "output"
    # perftest could not measure the CPU's frequency: the messages of the three seconds in the middle.
    assert outcome("ib_write_bw", 0, no_rate).value == pytest.approx(664644 * 65536 * 8e-9 / 3)
    assert outcome("ib_write_bw", 0, no_rate.replace("664644", "9" * 400)).fault == "output"
    # 2 messages of 65,536 bytes a second, which the rate in Gbit/s rounds to nothing.
    assert outcome("ib_write_bw", 0, nothing.replace("0.000000", "0.000002")).value == pytest.approx(0.001048576)
    # A node may print any number. These would be infinite as a rate, or zero as a time.
    assert outcome("ib_write_lat", 0, LATENCY.replace("1.83", "1e-320")).fault == "output"
    assert outcome("ib_write_bw", 0, RATE.replace("110.52", "1e308")).fault == "output"
    assert outcome("ib_write_bw", 124, RATE).fault == "timeout"
    assert outcome("ib_write_bw", 0, "").text == "it printed no result"
    failed = outcome("ib_write_bw", 1, RATE + STATUS_12)
    assert (failed.value, failed.fault) == (None, "client")
    assert "Failed status 12" in failed.text and "GID" not in failed.text


@pytest.mark.parametrize(
    ("fault", "kind"), [("slow", "slow"), ("blocked", "blocked"), ("sends slowly", "slow"), ("receives slowly", "slow")]
)
@pytest.mark.parametrize("nodes", [3, 4, 9, 40])
def test_the_bad_end_is_blamed_and_no_other(nodes: int, fault: Kind, kind: str) -> None:
    bad = {"node00001/rail0": fault}
    assert blamed(judge(Fabric(ends(nodes, 2), bad))) == {"node00001/rail0": ("bad", kind)}


def test_of_three_nodes_a_slow_end_and_a_blocked_one_on_the_other_rail_are_told_apart() -> None:
    said = judge(Fabric(ends(3, 2), {"node00000/rail0": "sends slowly", "node00001/rail1": "blocked"}))
    assert blamed(said) == {"node00000/rail0": ("bad", "slow"), "node00001/rail1": ("bad", "blocked")}
    assert not said.paths and not said.proven


def test_a_bad_path_of_two_good_ends_is_blamed_on_neither() -> None:
    fabric = Fabric(ends(4, 1), paths=frozenset({("node00000/rail0", "node00002/rail0")}))
    said = judge(fabric)
    assert blamed(said) == {}
    assert {(each.client, each.server) for each in said.paths if TESTS[each.test].client_sends} == {
        ("node00000/rail0", "node00002/rail0")
    }
    assert not said.proven


def test_with_two_nodes_the_bad_end_is_not_known() -> None:
    said = judge(Fabric(ends(2, 2), {"node00000/rail0": "blocked"}, noise=0))
    assert set(blamed(said).values()) == {("undecided", "")}
    assert set(blamed(said)) <= {"node00000/rail0", "node00001/rail0"}
    assert not said.proven


def surveyed(*values: tuple[str, str, float]) -> list[FabricResult]:
    """Make results of the survey, each from a server, a client and a rate in Gbit/s."""
    return [
        FabricResult("survey", number, "ib_write_bw", False, server, client, value)
        for number, (server, client, value) in enumerate(values)
    ]


def test_a_slow_result_with_a_node_that_is_lost_later_blames_only_that_node() -> None:
    one, two, three = (f"node0000{number}/rail0" for number in range(3))
    others = ("node00000/rail1", "node00001/rail1", 390.0), ("node00001/rail1", "node00000/rail1", 395.0)
    results = surveyed((three, two, 110.0), (two, one, 300.0), (one, two, 390.0), *others)
    lost = FabricResult("survey", 5, "ib_write_bw", False, three, one, None, "lost", "node00002")
    said = verdict(ends(3, 2), [*results, lost], True)
    assert blamed(said) == {three: ("lost", ""), "node00002/rail1": ("lost", "")}


def test_few_results_do_not_show_how_much_results_differ_so_a_quarter_less_is_good() -> None:
    all_ends, two = ends(2, 2), "node00001/rail0"
    others = ("node00000/rail1", "node00001/rail1", 390.0), ("node00001/rail1", "node00000/rail1", 395.0)
    a_quarter_less = surveyed(("node00000/rail0", two, 300.0), (two, "node00000/rail0", 305.0), *others)
    assert blamed(verdict(all_ends, a_quarter_less, True)) == {}
    much_less = surveyed(("node00000/rail0", two, 150.0), (two, "node00000/rail0", 155.0), *others)
    assert set(blamed(verdict(all_ends, much_less, True)).values()) == {("undecided", "")}


def test_a_fabric_without_faults_is_proven_also_if_rails_are_separate_networks() -> None:
    assert judge(Fabric(ends(4, 2)), FabricSettings()).proven

    class Separate(Fabric):
        def _share(self, test: str, server: str, client: str) -> float:
            one, other = self.ends[server], self.ends[client]
            return super()._share(test, server, client) if one.rail == other.rail else 0.0

    assert judge(Separate(ends(4, 2)), FabricSettings()).proven


def test_if_all_nics_are_equally_slow_only_a_floor_shows_it() -> None:
    all_ends = ends(4, 1)
    assert judge(Fabric(all_ends)).proven
    floors = {"ib_write_bw": 395.0 * 1.2}
    demanding = by_name(tuple(evolve(end, floors=floors) for end in all_ends.values()))
    assert not judge(Fabric(demanding)).proven


@pytest.mark.parametrize("seed", range(8))
def test_if_results_differ_much_good_nics_of_three_nodes_are_not_blamed(seed: int) -> None:
    good = Fabric(ends(3, 2), seed=seed, noise=0.2)
    assert judge(good).proven
    bad: dict[str, Kind] = {"node00000/rail0": "blocked"}
    assert blamed(judge(Fabric(ends(3, 2), bad, seed=seed, noise=0.2))) == {"node00000/rail0": ("bad", "blocked")}


def test_an_end_of_other_hardware_is_not_slow() -> None:
    all_ends = ends(6, 1)
    old = {f"node0000{n}/rail0" for n in (0, 1, 2)}
    mixed = by_name(tuple(evolve(end, group="100 Gb/s") if end.name in old else end for end in all_ends.values()))

    class Mixed(Fabric):
        def _share(self, test: str, server: str, client: str) -> float:
            return super()._share(test, server, client) * (0.25 if {server, client} & old else 1)

    assert judge(Mixed(mixed)).proven
    assert blamed(judge(Mixed(mixed, {"node00004/rail0": "slow"}))) == {"node00004/rail0": ("bad", "slow")}


@pytest.mark.parametrize("seed", range(3))
def test_one_percent_of_bad_ends_is_found_in_a_large_fleet(seed: int) -> None:
    all_ends = ends(250, 4)
    bad = some_bad(all_ends, 0.01, seed)
    fabric = Fabric(all_ends, bad, seed=seed)
    assert blamed(judge(fabric, FabricSettings(tests=("ib_write_bw",)))).keys() == bad.keys()
