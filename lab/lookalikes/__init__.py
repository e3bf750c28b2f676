"""The distributions that a node can look like. TRACKBED_LAB_LIKE selects one; without it, nodes look like Debian.

Each node runs Debian's kernel, systemd and programs. Only what a deploy looks at differs: os-release, the package manager with
its database, the names of packages, and the program that configures the network.
"""

from lab.choice import chosen
from lab.lookalikes.lookalike import Lookalike
from lab.lookalikes.rocky import ROCKY_9
from lab.lookalikes.ubuntu import UBUNTU_22_04

VARIABLE = "TRACKBED_LAB_LIKE"
LOOKALIKES = (ROCKY_9, UBUNTU_22_04)


def of_nodes() -> Lookalike | None:
    """The choice for a new lab.

    :raises BadInput: the variable names a distribution that is not in the list.
    """
    return chosen(VARIABLE, {lookalike.name: lookalike for lookalike in LOOKALIKES}, "distribution")
