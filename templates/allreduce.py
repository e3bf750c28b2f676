"""Measures an all-reduce over MPI: sums an array of single-precision numbers over all processes.

Arguments: the bytes of the array, and how many times it is summed. The first process prints the bytes and the average
microseconds.
"""

import sys
from array import array

from mpi4py import MPI

WARM_UP = 3


def main() -> None:
    """Measure. A wrong sum ends all processes with status 1."""
    size, iterations = map(int, sys.argv[1:3])
    world = MPI.COMM_WORLD
    mine = array("f", [1.0]) * (size // 4)
    total = array("f", [0.0]) * (size // 4)
    for _ in range(WARM_UP):
        world.Allreduce(mine, total)
    world.Barrier()
    began = MPI.Wtime()
    for _ in range(iterations):
        world.Allreduce(mine, total)
    world.Barrier()
    taken = MPI.Wtime() - began
    if total != array("f", [world.size]) * len(total):
        print("the sum is wrong", file=sys.stderr, flush=True)  # noqa: T201
        world.Abort(1)
    if world.rank == 0:
        print(size, f"{taken / iterations * 1e6:.2f}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
