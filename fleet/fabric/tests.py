"""The tests, as data: for each the command lines of its server and its client."""

from __future__ import annotations

from typing import Literal

from attrs import frozen

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
"""By the names of their programs."""


def server(test: FabricTest, end: End, port: int, seconds: int, gpu_memory: bool = False) -> tuple[str, ...]:
    """The command line of the server: a list of words."""
    return (*_pinned(end), test.program, *_arguments(test, end, port, seconds, gpu_memory))


def client(test: FabricTest, end: End, to: End, port: int, seconds: int, gpu_memory: bool = False) -> tuple[str, ...]:
    """The command line of the client that connects to the server at ``to``."""
    # Without its source address the connection manager would take whichever netdev has the route.
    source = ("--source_ip", end.address) if test.rdma_cm and end.address else ()
    return (*_pinned(end), test.program, *_arguments(test, end, port, seconds, gpu_memory), *source, to.address)


def _pinned(end: End) -> tuple[str, ...]:
    return ("taskset", "-c", end.cpus) if end.cpus else ()


def _arguments(test: FabricTest, end: End, port: int, seconds: int, gpu_memory: bool) -> tuple[str, ...]:
    words = ["-d", end.device, "-i", str(end.port), "-p", str(port), "-F", *test.arguments]
    if end.gid_index is not None and not test.rdma_cm:
        words += ["-x", str(end.gid_index)]
    if test.unit == "Gbit/s":
        words.append("--report_gbits")
    if test.timed:
        words += ["-D", str(seconds)]
    # From vendor documents: not run on GPUs. perftest must be built with CUDA.
    if gpu_memory and end.gpu is not None and test.unit == "Gbit/s":
        words.append(f"--use_cuda_bus_id={end.gpu}")
    return tuple(words)
