"""The distributions that a node can look like. TRACKBED_LAB_LIKE selects one; without it a node is the Debian that it is.

Below is always a Debian: its kernel, its systemd, its programs. What a deploy decides by looks different: os-release, the
package manager with its database, the names of packages, and who configures the network.
"""

import os

from lab.errors import BadInput
from lab.lookalikes.lookalike import Lookalike
from lab.lookalikes.rocky import ROCKY_9
from lab.lookalikes.ubuntu import UBUNTU_22_04

VARIABLE = "TRACKBED_LAB_LIKE"
LOOKALIKES = (ROCKY_9, UBUNTU_22_04)


def of_nodes() -> Lookalike | None:
    """The choice for a new lab.

    :raises BadInput: the variable names a distribution that is not in the list.
    """
    wanted = os.environ.get(VARIABLE)
    if not wanted:
        return None
    for lookalike in LOOKALIKES:
        if lookalike.name == wanted:
            return lookalike
    raise BadInput(f"{VARIABLE}={wanted}: no such distribution", f"Give {', '.join(each.name for each in LOOKALIKES)}.")
