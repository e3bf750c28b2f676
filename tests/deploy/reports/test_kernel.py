"""Public reports of kernels: which packages they have, and which of them a boot takes."""

from __future__ import annotations

import pytest

from tasks.host import kernel
from tasks.packages import AvailableVersions
from tests.deploy.conftest import Node, of
from tests.deploy.host.test_kernel import RUNNING, UBUNTU, dpkg


@pytest.mark.parametrize(
    ("release", "separate"),
    [
        pytest.param("6.14.0-1015-nvidia-64k", False, id="nv-kernels-191"),
        pytest.param("6.8.0-1040-nvidia", False, id="nv-kernels-201"),
        pytest.param("6.16.0-16-generic", False, id="kairos-3610"),
        pytest.param("7.0.0-14-generic", False, id="emba-2057"),
        pytest.param("5.15.0-1042-azure", True, id="runner-images-7587"),
    ],
)
def test_a_kernel_has_its_drivers_in_a_package_of_their_own_or_not(node: Node, release: str, separate: bool) -> None:
    node.data = {"kernel": {"release": release}}
    names = ["modules", "modules-extra"] if separate else ["modules"]
    versions = [f" linux-{each}-{release} | 1 | https://example.com noble/main amd64 Packages" for each in names]
    result = node.deploy(kernel.pin, {**UBUNTU, **RUNNING, **dpkg(), of(AvailableVersions): versions})
    assert result.flat[0].endswith(f" linux-image-{release} linux-headers-{release}")
    assert any("modules-extra" in command for command in result.flat) is separate
