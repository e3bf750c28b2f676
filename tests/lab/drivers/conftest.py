"""What the tests of drivers share."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lab import Node, repository
from lab.packages import toolchain


@contextmanager
def as_debian_makes_it(node: Node, mirror: repository.Repository) -> Iterator[Node]:
    """The node without the lab's own build of the driver, and with this mirror in the place of Debian's."""
    with repository.serve(mirror.folder) as served:
        # An emulated apt needs half a minute for the lists of Debian's own.
        node.sh(
            "rm -f /lib/modules/$(uname -r)/updates/erdma.ko; depmod; rm -rf /etc/apt/sources.list.d/* /var/lib/apt/lists;"
            f"echo force-unsafe-io > /etc/dpkg/dpkg.cfg.d/lab; echo 'deb [trusted=yes] {served} ./' > /etc/apt/sources.list"
        )
        yield node


@pytest.fixture
def bare(node: Node) -> Iterator[Node]:
    """A node whose mirror has the packages for building a driver."""
    with as_debian_makes_it(node, toolchain.mirror(node.image)) as made:
        yield made
