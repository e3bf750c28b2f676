"""The tests, as data: for each the command lines of its server and its client."""

from __future__ import annotations

from typing import Any, Literal

from attrs import Attribute, field, frozen

from agent.spec.validators import Within
from fleet.fabric.ends import End

Unit = Literal["Gbit/s", "us"]

LEAST_SECONDS = 3
"""perftest leaves out the first and the last quarter of its time, in whole seconds (perftest_parameters.c)."""


@frozen
class FabricTest:
    """One of perftest's programs. ``across``: it is also run between NICs of different rails.

    ``rdma_cm``: the connection is made by the RDMA connection manager, which finds device and GID by the IP addresses.
    ``timed``: it runs for a number of seconds instead of a number of messages. ``client_sends``: the data go to the server.
    """

    program: str
    unit: Unit
    arguments: tuple[str, ...] = ()
    across: bool = False
    rdma_cm: bool = False
    timed: bool = True
    client_sends: bool = True


TESTS = {
    test.program: test
    for test in (
        FabricTest("ib_write_bw", "Gbit/s", across=True),
        FabricTest("ib_read_bw", "Gbit/s", ("-q", "30"), client_sends=False),
        FabricTest("ib_send_bw", "Gbit/s", ("-R",), rdma_cm=True),
        FabricTest("ib_write_lat", "us", timed=False),
    )
}
"""The tests by the names of their programs."""

ALL_REDUCE = "all_reduce"
"""The name of the stage in which groups of nodes run a collective (fleet/fabric/collective.py)."""


LARGEST_SIZE = 1 << 30

LEAST_MESSAGES = 5
"""The fewest messages that perftest accepts (MIN_ITER in perftest_parameters.h)."""


def _known(_: object, attribute: Attribute[Any], tests: tuple[str, ...]) -> None:
    if unknown := sorted(set(tests) - {*TESTS, ALL_REDUCE}):
        raise ValueError(f"{attribute.name}: {unknown[0]!r} is not a test; tests are {', '.join((*TESTS, ALL_REDUCE))}")
    if not set(tests) & TESTS.keys():
        raise ValueError(f"{attribute.name}: it has none of {', '.join(TESTS)}; leave it out for all tests")


@frozen
class FabricSettings:
    """What a run does, the same for all nodes.

    ``tests``: programs of perftest, and the collective stage. ``seconds``: how long a bandwidth is measured. ``size``: the
    bytes of each of its messages. ``messages``: how many a latency is measured with. ``grace``: seconds that a test may take
    beyond that, for the connection and for what is still on its way when the time is over. ``across_rails``: also between
    rails. ``at_once``: the most tests at the same time; None is all of a round. ``gpu_memory``: the messages are in the memory
    of a GPU of the NIC's NUMA node. ``collective_size``: the bytes that a collective reduces.
    """

    tests: tuple[str, ...] = field(default=(*TESTS, ALL_REDUCE), validator=_known)
    seconds: int = field(default=5, validator=Within(LEAST_SECONDS, 3600, "seconds"))
    size: int = field(default=65536, validator=Within(1, LARGEST_SIZE, "bytes"))
    messages: int = field(default=1000, validator=Within(LEAST_MESSAGES, LARGEST_SIZE, "messages"))
    grace: int = field(default=15, validator=Within(1, 3600, "seconds"))
    across_rails: bool = True
    at_once: int | None = field(default=None, validator=Within(1, LARGEST_SIZE, "tests"))
    gpu_memory: bool = False
    collective_size: int = field(default=64 << 20, validator=Within(4, LARGEST_SIZE, "bytes"))
    seed: int = 1

    @property
    def window(self) -> int:
        """The seconds whose messages perftest counts: without the first and the last quarter of its time, in whole seconds."""
        return self.seconds - 2 * (self.seconds // 4)


def rounded(value: float) -> str:
    """A result with three digits: a lab's links have a thousandth of the rate of a server's."""
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


IPV6 = "--ipv6-addr"
"""perftest's option, on both sides, to connect by IPv6 addresses. It came with version 23.07 (perftest_parameters.c)."""


def server(test: FabricTest, end: End, port: int, settings: FabricSettings) -> tuple[str, ...]:
    """The command line of the server: a list of words."""
    return (*pinned(end), test.program, *_arguments(test, end, end, port, settings))


def client(test: FabricTest, end: End, to: End, port: int, settings: FabricSettings) -> tuple[str, ...]:
    """The command line of the client that connects to the server at ``to``."""
    # Without its source address the connection manager would take whichever netdev has the route.
    source = (end.source_option, end.address) if test.rdma_cm and end.address else ()
    return (*pinned(end), test.program, *_arguments(test, end, to, port, settings), *source, to.address)


def pinned(end: End) -> tuple[str, ...]:
    """The words before a program that run it on the CPUs of the NIC's NUMA node."""
    return ("taskset", "-c", end.cpus) if end.cpus else ()


def _arguments(test: FabricTest, end: End, to: End, port: int, settings: FabricSettings) -> tuple[str, ...]:
    """The options of an end of a test whose server is at ``to``."""
    words = ["-d", end.device, "-i", str(end.port), "-p", str(port), "-F", *test.arguments]
    words += [IPV6] if ":" in to.address else []
    if end.gid_index is not None and not test.rdma_cm:
        words += ["-x", str(end.gid_index)]
    if test.unit == "Gbit/s":
        words += ["--report_gbits", "-s", str(settings.size)]
    words += ["-D", str(settings.seconds)] if test.timed else ["-n", str(settings.messages)]
    # From vendor documents: not run on GPUs. perftest must be built with CUDA.
    if settings.gpu_memory and end.gpu is not None and test.unit == "Gbit/s":
        words.append(f"--use_cuda_bus_id={end.gpu}")
    return tuple(words)
