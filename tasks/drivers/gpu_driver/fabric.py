"""NVLink's fabric, which registers each GPU of a machine with NVSwitches. Until then CUDA fails with 802.

The fabric manager sets it up. From NVLink 5 on (B200 and later) it needs the NVLink subnet manager, nvlsm, and reaches the
NVSwitches by ConnectX-7 functions whose product data (VPD) have SW_MNG.

From NVIDIA's Fabric Manager User Guide; not run on such a machine.
"""

from __future__ import annotations

from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks import reboot
from tasks.common.commands import Commands
from tasks.common.facts import Lines
from tasks.common.texts import HEADER, Texts, replace
from tasks.host import kernel
from tasks.packages import Family, vendor_repository
from tasks.packages.vendor_repository import Package

SUBNET_MANAGER = "nvlsm"
AT_BOOT = "/etc/modules-load.d/trackbed-nvlink.conf"

STATES = r"""
timeout 120 nvidia-smi -q 2>/dev/null | awk '
  /^GPU / { gpu = " of " $2 }
  /^    [^ ]/ { within = $1 == "Fabric"; state = "" }
  within && $1 == "State" { sub(/^[^:]*: */, ""); state = $0 }
  within && $1 == "Status" && state != "" && state != "N/A" {
    sub(/^[^:]*: */, "")
    if (state != "Completed" || $0 != "Success") print "fabric state" gpu ": " state ", status: " $0
  }'
"""
"""A script that prints the state of the fabric for each GPU that it has not registered. Without NVSwitches the state is N/A."""

WAIT = f"""
states() {{ {STATES}
}}
left=24
while states | grep -qE ': (In Progress|Not Started),' && [ "$left" -gt 0 ]; do
  left=$((left - 1))
  sleep 5
done
"""
"""A script that waits up to two minutes while the fabric registers GPUs."""


def refusal(unregistered: list[str], fabric_manager: bool) -> str:
    """The message on GPUs that the fabric has not registered."""
    remedy = (
        "`journalctl -u nvidia-fabricmanager` shows why; for B200 and later it needs nvlsm, and the module ib_umad"
        if fabric_manager
        else "give fabric_manager True, or where the NVSwitches are outside of the machine (NVL72) look at their fabric manager"
    )
    return f"gpu_driver: CUDA fails with 802 until NVLink's fabric has registered the GPUs: {'; '.join(unregistered)}; {remedy}"


# Only such a function has the word in its product data; other functions have the same PCI device ID.
_SWITCHES = """
root=$1
for device in "$root"/sys/bus/pci/devices/*; do
  [ "$(cat "$device/vendor" 2>/dev/null)" = 0x15b3 ] || continue
  if timeout 20 grep -aqs SW_MNG "$device/vpd"; then echo "${device##*/}"; fi
done
"""


class NvSwitches(Lines):
    """The PCI addresses of the functions by which NVSwitches of NVLink 5 are managed."""

    shell = _SWITCHES


def awaits_reboot() -> bool:
    """For an operation: whether the fabric is set up only after OFED's reboot: its ib_umad may not load before that."""
    return reboot.awaited_by("ofed") and bool(host.get_fact(NvSwitches))


@operation()
def subnet_manager(family: Family) -> Commands:
    """Install nvlsm, and load the module through which it reaches NVSwitches, if the node has NVSwitches that need them."""
    if not host.get_fact(NvSwitches):
        host.noop("the node has no NVSwitches of NVLink 5")
        return
    yield from vendor_repository.packages._inner(
        wanted=(Package(SUBNET_MANAGER),),
        family=family,
        remedy=f"gpu_driver.fabric_manager: NVSwitches of NVLink 5 need {SUBNET_MANAGER}, which NVIDIA's repository has; give "
        "the source 'vendor', or install it from there",
    )
    # Before the fabric manager starts, which checks for it.
    waits = kernel.pending_release() or awaits_reboot()
    have = host.get_fact(Texts, paths=(AT_BOOT,))
    yield from replace(have, {AT_BOOT: f"{HEADER}ib_umad\n"}, "" if waits else "modprobe ib_umad\n")
