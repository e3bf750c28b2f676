"""The driver that is loaded, and the one that is installed."""

import shlex

import pytest

from tasks.drivers import gpu_driver
from tasks.packages.dkms import ModuleState
from tests.deploy.conftest import SIGNATURES, Answers, Node, of
from tests.deploy.drivers.gpu_node import (
    ABSENT,
    BOOT,
    BUILDS,
    IN_MEMORY,
    LOADED,
    PREFIX,
    REQUESTS,
    SMI,
    STALE,
    STATE,
    USERS,
    VERSION,
    deploy,
    due,
    there,
    wants,
)


def test_another_loaded_driver_is_replaced_if_nothing_uses_it(node: Node) -> None:
    result = deploy(node, there(), there(nvidia=STALE))
    # In this test's answers it stays loaded, so the last resort is a reboot.
    reloaded, initramfs, request = result.commands[f"{PREFIX}Loaded modules"]
    assert "rmmod" in reloaded
    assert " sh yes " in reloaded
    assert "update-initramfs -u" in initramfs
    assert f" gpu_driver 'the driver {VERSION} (AB) is" in request and "could not be unloaded" in request


@pytest.mark.parametrize(
    "found",
    [
        there(STALE),
        there(ABSENT),
        there(ABSENT, **{of(ModuleState, "nouveau"): ["path /lib/modules/K/nouveau.ko", "loaded XY"]}),
    ],
)
def test_a_driver_that_the_kernel_would_refuse_is_neither_loaded_nor_waited_for(node: Node, found: Answers) -> None:
    refused = {SIGNATURES: ["nvidia.ko: the key mok.pub is not enrolled"]}
    result = deploy(node, {**refused, **found})
    refusal = result.refusal
    assert "gpu_driver: with Secure Boot" in refusal and "nvidia.ko: the key mok.pub" in refusal


# Without a request, and with one for a version before, whose modules the initramfs may contain.
@pytest.mark.parametrize("asked", [{}, due("gpu_driver", "the driver 570.86.15 is installed, and another is loaded")])
def test_another_loaded_driver_in_use_requests_a_reboot(node: Node, asked: Answers) -> None:
    result = deploy(node, there(nvidia=STALE, **{USERS: ["python3 (7)"], **asked}))
    initramfs, request = result.commands[f"{PREFIX}Loaded modules"]
    assert "update-initramfs -u" in initramfs
    # The reason stays the same while others use it.
    assert f" {VERSION} (AB) is" in request and request.endswith("in use'")
    assert any("in use by python3 (7)" in line for line in result.log)


def test_a_build_after_a_reboot_that_no_deploy_has_seen_is_another_reason_for_a_reboot(node: Node) -> None:
    wants(node)
    node.data["reboot"] = {"policy": "allow"}
    used = {USERS: ["python3 (7)"]}
    *_, request = node.deploy(gpu_driver.install, there(nvidia=STALE, **used)).commands[f"{PREFIX}Loaded modules"]
    *_, reason = shlex.split(request)
    built_for_ofed = [*STALE[:1], "installed EF", *STALE[2:]]
    later = there(nvidia=built_for_ofed, **used, **{REQUESTS: [f"{BOOT}2", f"gpu_driver {BOOT}1 {reason} "]})
    result = node.deploy(gpu_driver.install, later)
    assert not result.failed
    assert " sh /var/lib/trackbed/reboots gpu_driver " in result.commands[f"{PREFIX}Loaded modules"][-1]


def test_a_loaded_driver_of_another_version_is_not_the_installed_one(node: Node) -> None:
    # The same srcversion: only the version differs.
    result = deploy(node, {**there(), IN_MEMORY: "570.86.15"}, there())
    assert result.planned[f"{PREFIX}Loaded modules"]
    assert result.flat == []


@pytest.mark.parametrize(
    "loaded",
    [
        ("nouveau",),
        pytest.param(("nova_core",), id="Olares-3963"),
        ("nova_core", "nova_drm"),
        ("nouveau", "nova_drm"),
    ],
)
def test_the_kernels_own_drivers_request_a_reboot_once(node: Node, loaded: tuple[str, ...]) -> None:
    others = {of(ModuleState, name): ["path /lib/modules/K/x.ko", "users 0", "loaded XY"] for name in loaded}
    answers = {**others, **{k: v for k, v in there(nvidia=ABSENT).items() if k not in others}}
    initramfs, request = deploy(node, answers).commands[f"{PREFIX}Loaded modules"]
    assert "update-initramfs -u" in initramfs
    reason = f"{', '.join(loaded)} is loaded, which the driver {VERSION} replaces"
    assert request.endswith(f"gpu_driver '{reason}'")
    off = {STATE: ["LoadState=loaded UnitFileState=disabled "], SMI: ["failed x"]}
    result = deploy(node, {**answers, **due("gpu_driver", reason), **off})
    # Until the reboot nothing else is done, and nothing fails.
    assert result.flat == []
    assert not result.failed


GPUS = "0x10de"


@pytest.mark.parametrize("module", [ABSENT, LOADED])
def test_gpus_that_are_all_given_to_virtual_machines_are_named(node: Node, module: list[str]) -> None:
    held = {GPUS: ["0000:17:00.0 vfio-pci", "0000:18:00.0 vfio-pci"]}
    result = deploy(node, {**held, **there(nvidia=module)})
    assert ": 0000:17:00.0 (vfio-pci), 0000:18:00.0 (vfio-pci)" in result.refusal


@pytest.mark.parametrize(
    "rest", [pytest.param("0000:18:00.0 nvidia", id="dra-driver-nvidia-gpu-1089"), "0000:18:00.0 "]
)
def test_gpus_of_which_some_are_given_to_virtual_machines_are_named_and_left(node: Node, rest: str) -> None:
    result = deploy(node, {**there(), GPUS: ["0000:17:00.0 vfio-pci", rest]})
    assert not result.failed
    assert result.flat == []
    assert any(line.endswith(" 0000:17:00.0 (vfio-pci)") for line in result.log)


def test_what_is_built_for_a_kernel_waits_until_that_kernel_runs(node: Node) -> None:
    wants(node)
    node.data["kernel"] = {"release": "6.1.0-10-amd64"}
    nothing = {BUILDS: "", SMI: ["missing"], STATE: ["LoadState=not-found"]}
    result = node.deploy(gpu_driver.install, there(nvidia=["path "], **nothing))
    assert result.flat == []
    assert not result.failed
