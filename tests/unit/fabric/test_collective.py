"""The collective stage without nodes: the groups, the command line, what the programs print, and the verdict."""

from collections import Counter

import pytest
from attrs import evolve

from fleet.fabric.collective import LARGEST_GROUP, UCX_ACCEPTS_ALL, Collective, Group, groups, judge, launcher, outcome
from fleet.fabric.ends import End, Ends, by_name
from fleet.fabric.launch import FILES, SSH, Keys, files_of_first, files_of_other
from tests.sim import fabric

SIZE = 67108864
GROUP = Group(0, 0, "mpi4py", ("a/fab0", "b/fab0"))


def with_programs(nodes: int, rails: int, *programs: str) -> Ends:
    made = fabric.ends(nodes, rails).values()
    return by_name(tuple(evolve(end, programs=programs, address="10.0.0.1") for end in made))


@pytest.mark.parametrize(("nodes", "rails"), [(2, 1), (3, 2), (32, 2), (33, 1), (100, 8)])
def test_each_good_nic_is_in_one_group_of_its_rail(nodes: int, rails: int) -> None:
    ends = with_programs(nodes, rails, "mpi4py", "mpirun")
    made = groups(ends, ends, 1)
    assert Counter(name for group in made for name in group.ends) == Counter([*ends])
    assert all({ends[name].rail for name in group.ends} == {group.rail} for group in made)
    sizes = [len(group.ends) for group in made]
    assert max(sizes) <= LARGEST_GROUP and max(sizes) - min(sizes) <= 1
    assert [group.number for group in made] == list(range(len(made)))
    assert groups(ends, ends, 1) == made


def test_nodes_with_the_best_common_program_reduce_together_and_those_without_are_left_out() -> None:
    both, one, none = (("mpirun", "osu_allreduce", "mpi4py"), ("mpirun", "mpi4py"), ("mpi4py",))
    programs = [both, both, one, one, none, none]
    ends = by_name(
        tuple(evolve(end, programs=each) for end, each in zip(fabric.ends(6, 1).values(), programs, strict=True))
    )
    made = {group.program: group.ends for group in groups(ends, ends, 1)}
    assert made == {
        "osu_allreduce": ("node00000/rail0", "node00001/rail0"),
        "mpi4py": ("node00002/rail0", "node00003/rail0"),
    }


def test_the_first_node_starts_the_program_on_each_with_its_own_device_gid_and_cpus() -> None:
    one = End("a", "fab0", 0, "x", device="mlx5_0", netdev="eth0", address="10.0.0.1", gid_index=3, cpus="0-3")
    other = evolve(one, node="b", device="mlx5_4", netdev="", address="10.0.1.2", gid_index=None, cpus="")
    words = launcher(Group(0, 0, "osu_allreduce", ("a/fab0", "b/fab0")), by_name((one, other)), SIZE, SSH)
    program = ("osu_allreduce", "-m", f"{SIZE}:{SIZE}", "-i", "20")
    assert words[words.index("-np") :] == (
        *("-np", "1", "-H", "10.0.0.1:1", "env", "UCX_NET_DEVICES=mlx5_0:1", "NCCL_IB_HCA==mlx5_0:1", UCX_ACCEPTS_ALL),
        *("UCX_IB_GID_INDEX=3", "NCCL_IB_GID_INDEX=3", "NCCL_SOCKET_IFNAME==eth0", "taskset", "-c", "0-3", *program),
        *(
            ":",
            "-np",
            "1",
            "-H",
            "10.0.1.2:1",
            "env",
            "UCX_NET_DEVICES=mlx5_4:1",
            "NCCL_IB_HCA==mlx5_4:1",
            UCX_ACCEPTS_ALL,
            *program,
        ),
    )
    assert words[words.index("oob_tcp_if_include") + 1] == "10.0.0.0/23"
    assert words[words.index("plm_rsh_agent") + 1] == f"ssh -F {FILES}/ssh_config"


def test_the_others_accept_only_the_first_node_and_it_checks_their_key() -> None:
    keys = Keys.make()
    first, other = (End(node, "fab0", 0, "x", address=f"10.0.0.{n}") for n, node in enumerate("ab", 1))
    files = files_of_other(keys, first, other, 18515)
    assert files["authorized_keys"].startswith('restrict,from="10.0.0.1" ssh-ed25519 ')
    assert {"ListenAddress 10.0.0.2", "Port 18515", "PasswordAuthentication no"} <= {*files["sshd_config"].splitlines()}
    known = files_of_first(keys, [(other, 18515)])["known_hosts"]
    assert known == f"[10.0.0.2]:18515 {keys.host.public}\n"
    assert keys.host.private not in str(files_of_first(keys, []).values())


# nccl-tests 2.13's format (common.cu): size count type redop root, then time algbw busbw #wrong out of place and in place.
NCCL = f"""\
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
    {SIZE}      16777216     float     sum      -1    691.7   97.02  181.92      0    690.7   97.17  182.19      0
# Out of bounds values : 0 OK
"""


@pytest.mark.parametrize(
    ("program", "output", "value"),
    [
        ("all_reduce_perf", NCCL, 181.92 * 8),
        ("all_reduce_perf", NCCL.replace("181.92      0", "181.92      7"), None),
        (
            "osu_allreduce",
            f"# OSU MPI Allreduce Latency Test\n# Size       Avg Latency(us)\n{SIZE}      1000.00\n",
            536.870912,
        ),
        ("mpi4py", f"{SIZE} 1000.00\n", 536.870912),
        ("mpi4py", "1024 1000.00\n", None),
        ("mpi4py", "", None),
    ],
)
def test_the_bus_bandwidth_is_read_from_what_each_program_prints(
    program: str, output: str, value: float | None
) -> None:
    made = outcome(evolve(GROUP, program=program), SIZE, 0, output)
    assert made.value == (None if value is None else pytest.approx(value))
    assert made.fault == ("output" if value is None else "")


def test_a_program_that_fails_or_hangs_is_a_result_with_its_last_words() -> None:
    failed = outcome(GROUP, SIZE, 1, "-----\nORTE was unable to reliably start one or more daemons.\n-----\n")
    assert (failed.fault, failed.text) == ("client", "ORTE was unable to reliably start one or more daemons.")
    assert outcome(GROUP, SIZE, 124, "").fault == "timeout"


def test_of_a_program_that_aborts_the_first_and_the_last_message_are_shown_and_no_backtrace() -> None:
    first = "[b:1903 :0:1903] ud_ep.c:278  Fatal: UD endpoint 0x55 to <no debug data>: unhandled timeout error"
    frames = [f"{n}  /lib/x86_64-linux-gnu/libuct_ib.so.0(+0x6c0{n:02}) [0x7fe7e97c50c8]" for n in range(40)]
    again = [f"[b:01903] [{n:2}] /lib/x86_64-linux-gnu/libucs.so.0(+0x26b{n:02})[0x7fe7eb8bdb0b]" for n in range(40)]
    last = "mpirun noticed that process rank 1 on node b exited on signal 6 (Aborted)."
    output = [first, "==== backtrace (tid: 1903) ====", *frames, "=" * 33, *again, "-" * 70, last, "-" * 70]
    assert outcome(GROUP, SIZE, 134, "\n".join(output)).text == f"{first}\n{last}"
    long = "\n".join(f"message {n} of many" for n in range(100))
    text = outcome(GROUP, SIZE, 1, long).text
    assert text.startswith("message 0 of many\n") and " [...] " in text and text.endswith("\nmessage 99 of many")


def test_a_group_is_bad_by_the_floor_and_by_half_of_what_is_usual() -> None:
    ends = with_programs(8, 1, "mpi4py", "mpirun")
    names = sorted(ends)
    made = [
        Collective(Group(number, 0, "mpi4py", tuple(names[2 * number : 2 * number + 2])), value)
        for number, value in enumerate((100.0, 95.0, 102.0, 40.0))
    ]
    assert [bool(each.message) for each in judge(ends, made)] == [False, False, False, True]
    assert judge(ends, made)[3].message == "40% of the usual 100.00 Gbit/s"
    # Two groups do not show which of them is unusual.
    assert not any(each.message for each in judge(ends, made[2:]))
    demanding = by_name(tuple(evolve(end, floors={"all_reduce": 101.0}) for end in ends.values()))
    assert [bool(each.message) for each in judge(demanding, made)] == [True, True, False, True]
