"""Nodes that look like another distribution than Debian, each in a lab of its own."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest

from lab import Node, lookalikes
from tests.lab.conftest import DEPLOYED, Done, booted, deployed_once, succeeded, wait_ready


@attrs.frozen
class System:
    """A node, and the first deploy of it."""

    node: Node
    first_deploy: Done


@contextmanager
def system(name: str) -> Iterator[System]:
    """One node that looks like this distribution, after a deploy of the fresh image."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRACKBED_LAB", f"{os.environ['TRACKBED_LAB']}-{name.partition('-')[0]}")
        patch.setenv(lookalikes.VARIABLE, name)
        with booted(1) as nodes:
            yield System(nodes[0], deployed_once(nodes))


def as_deployed(made: System) -> Node:
    """The node as the first deploy left it."""
    succeeded(made.first_deploy)
    made.node.restore(DEPLOYED)
    wait_ready(made.node)
    return made.node
