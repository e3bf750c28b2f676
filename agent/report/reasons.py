"""Each reason of a condition, with what to do about it: the report, `trackbed doctor` and the documentation read it here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from attrs import frozen

from agent.report.names import DEVICES_READY, READY, UP_TO_DATE
from agent.report.records import Condition, FunctionFault, Severity, Status

ANY = "any check"
"""Stands for the type of a condition that the engine makes for any check without an answer."""


@frozen
class Reason:
    """A reason, and the status that it gives. ``remedy`` is empty if the message has it, or if nothing is to be done."""

    name: str
    status: Status = "True"
    remedy: str = ""


# A driver that is there may have refused a device: its firmware does not start, say.
LOG_IF_LOADED = "if it is loaded, see the kernel log (dmesg) for its error"
UNREADABLE_DEVICE = "see the kernel's log (dmesg), and reset the device, load its driver again or reboot the node"

_WAIT = "wait: it is over with the next pass; trackbed wait"
_SERVICE = "see: systemctl status trackbed; journalctl -u trackbed"
_SPEC = "correct the inventory and deploy again"
_TEST = "test it again: pyinfra INVENTORY deploys/fabric.py"
_SLOTS = "check the slots and the selector; until then none of them is changed"
_RDMA = (Reason("AllPresent"), Reason("EnoughOfThem"), Reason("OptionalDiffers"))

REASONS: Mapping[str, tuple[Reason, ...]] = {
    "Carrier": (
        Reason("AllConnected"),
        Reason("NoCarrier", "False", "check the cable, the switch port and, for a VF, its PF or its representor"),
    ),
    "ClockSynchronised": (
        Reason("Synchronised"),
        Reason(
            "NotSynchronised",
            "False",
            "start chronyd or systemd-timesyncd; see `timedatectl`, and whether the time servers can be reached",
        ),
    ),
    "ContainerMemlock": (
        Reason("Unlimited"),
        Reason("NoRuntime"),
        Reason(
            "MemlockLimited",
            "False",
            "set LimitMEMLOCK=infinity in a drop-in of the runtime's unit (with k3s or RKE2: of their service) and restart it: "
            "containers that start after that have it",
        ),
    ),
    "Converged": (
        Reason("AsWanted"),
        Reason("OptionalDiffers"),
        Reason("Blocked", "False"),
        Reason("Checking", "Unknown", "wait; if it stays, the message names the call that has not returned"),
        Reason("Converging", "False", _WAIT),
        Reason(
            "Deferred", "False", "free the device from the users in the message, or allow more: trackbed apply --allow"
        ),
        Reason("DeviceLost", "Unknown", _WAIT),
        Reason("Failed", "False"),
        Reason("NoSpec", "False", _SPEC),
        Reason(
            "Observing", "False", "nothing: `mode` is observe, and the message has the first change that would be made"
        ),
        Reason("PassCrashed", "Unknown", f"report it with the output of trackbed bundle; {_SERVICE}"),
        Reason("Starting", "Unknown", _WAIT),
        Reason("Unsupported", "False", "take the value out of the inventory, or set the NIC's `required` to False"),
    ),
    "DevicePlugins": (
        Reason("Served"),
        Reason("NoKubelet"),
        Reason("NoSocket", "False", "see its log: journalctl -u kubelet"),
    ),
    "DevicesAnswer": (
        Reason("AllAnswer"),
        Reason("DeviceHung", "Unknown", UNREADABLE_DEVICE),
        Reason("DeviceUnreadable", "Unknown", UNREADABLE_DEVICE),
    ),
    "ErrorCounters": (
        Reason("NoErrors"),
        Reason("ErrorsRising", "False", "check cable, transceiver and switch port (ethtool -S, rdma statistic)"),
    ),
    "FabricProven": (
        Reason("TestPassed"),
        Reason("TestFailed", "False", f"repair it, then {_TEST}"),
        Reason("ChangedSinceTest", "Unknown", _TEST),
        Reason("NotTested", "Unknown", _TEST),
        Reason("ResultUnreadable", "Unknown", _TEST),
    ),
    "GpusPresent": (
        Reason("AllPresent"),
        Reason("DriverMissing", "False", "install the driver, and see dmesg: modprobe nvidia"),
        Reason(
            "GpusMissing",
            "False",
            "compare with lspci -d 10de: and see dmesg for Xid errors: a GPU that fell off the bus comes back with a power "
            "cycle",
        ),
        Reason("PeerMemoryMissing", "False", "modprobe nvidia_peermem, and give it in kernel_modules"),
    ),
    "IrqbalancePolicy": (
        Reason("PolicyHeld"),
        Reason("IrqbalanceRunning", "False", "stop it: systemctl disable --now irqbalance"),
        Reason("IrqbalanceUnbanned", "False", "run the deploy"),
        Reason("NotRead", "Unknown"),
    ),
    "KernelModules": (
        Reason("AsInstalled"),
        Reason("NothingToCompare"),
        Reason(
            "ModulesStale", "False", "load them again, or reboot; if that does not help: update-initramfs or dracut"
        ),
    ),
    "KubeletHugepages": (
        Reason("Counted"),
        Reason(
            "CountedBefore",
            "False",
            "drain the Node, since some kubelets that restart end pods with devices; then systemctl restart kubelet (with k3s "
            "or RKE2: their service)",
        ),
    ),
    "LinkFlaps": (
        Reason("Steady"),
        Reason(
            "LinkFlapped",
            "False",
            "check cable, transceiver and switch port; a link that stays up comes back by itself",
        ),
    ),
    "NicsPresent": (
        Reason("AllPresent"),
        Reason("AddressGivenTwice", "False", "give VFs addresses that no other function has (vfs.groups)"),
        Reason("DeviceHung", "Unknown", UNREADABLE_DEVICE),
        Reason("DeviceUnreadable", "Unknown", UNREADABLE_DEVICE),
        Reason("NicAmbiguous", "False", "select one of them by pci or mac, or give select.each if each is to be a NIC"),
        Reason("NicClaimedTwice", "False", "keep one of them, or select another function"),
        Reason("NicMissing", "False", "check the slot, the driver and the selector"),
        Reason("NicNotFirstPort", "False", "select the first port, and configure the other ports by other programs"),
        Reason("NicsUnknown", "Unknown", UNREADABLE_DEVICE),
        Reason("TooFewNics", "False", _SLOTS),
        Reason("TooManyNics", "False", _SLOTS),
    ),
    "NicsReady": (
        Reason("EnoughReady"),
        Reason("TooFewReady", "False", "see the verdict on each NIC: trackbed status --devices"),
    ),
    "OriginalsKept": (
        Reason(
            "NicMissing",
            "False",
            "they are restored once it is clear: select that NIC by pci or mac, or take it out of the spec",
        ),
        Reason("NotWritten", "False", "make room in /run"),
        Reason("Unreadable", "False", "set those by hand"),
    ),
    "PartitionKeys": (*_RDMA, Reason("KeyMissing", "False")),
    "PcieLink": (
        Reason("FullWidthAndSpeed"),
        Reason("PcieDegraded", "False", "reseat the card, and compare with the slot: lspci -vv, LnkCap and LnkSta"),
    ),
    "QueueInterrupts": (
        Reason("Recognised"),
        Reason("PlacedByKernel"),
        Reason("CpusOwned"),
        Reason(
            "OwnersUnknown",
            "False",
            "if it is the kubelet's file, drain the node and delete that: the kubelet does not start with it either (its log "
            "says so); else see the kernel log (dmesg)",
        ),
        Reason(
            "NotRecognised",
            "False",
            "the driver's interrupts need a record: see \"Add a NIC family\" in Trackbed's documentation",
        ),
    ),
    "RdmaCharDevices": (Reason("AllPresent"), Reason("CharDeviceMissing", "False")),
    "RdmaDevices": (*_RDMA, Reason("DeviceMissing", "False")),
    "RdmaNodeGuids": (*_RDMA, Reason("NodeGuidMissing", "False")),
    "RdmaPorts": (Reason("AllActive"), *_RDMA[1:], Reason("PortNotReady", "False")),
    "SubnetManager": (Reason("AllConfigured"), *_RDMA[1:], Reason("NotConfigured", "False")),
    "Uncontended": (
        Reason("NobodyInterferes"),
        Reason("Contended", "False", "stop the program in the message from setting the value, then: trackbed apply"),
    ),
    "UpToDate": (
        Reason("SpecDone"),
        Reason("Deferred", "False", "free the device from the users in the message, or wait until they end"),
        Reason("Refused", "False", _SPEC),
    ),
    "VfNetdevs": (
        Reason("AllCreated"),
        Reason(
            "NetdevMissing",
            "False",
            "see the kernel log (dmesg) for the driver's error; it may wait for an answer of the PF's driver",
        ),
        Reason(
            "NetdevUnstable",
            "False",
            "see the kernel log (dmesg) for what the driver is refused; another version of it or of the PF's driver may help",
        ),
    ),
    "WorkerAlive": (
        Reason("DeviceTried", "False", _WAIT),
        Reason("Stopped", "False", "systemctl start trackbed"),
        Reason("WorkerLost", "False", _SERVICE),
        Reason("WorkerStuck", "False", UNREADABLE_DEVICE),
    ),
    ANY: (
        Reason("NotYetRead", "Unknown", _WAIT),
        Reason("ProbeFailed", "Unknown", "it is read again after ten seconds; the message has the file and the error"),
        Reason("ProbeTimedOut", "Unknown", "see what hangs: dmesg, and /proc/*/task/*/stack of the agent's worker"),
    ),
    READY: (
        Reason("AsSpecified"),
        Reason("AgentSilent", "Unknown", _SERVICE),
        Reason("NoReport", "Unknown", _SERVICE),
    ),
    DEVICES_READY: (
        Reason("AllReady"),
        Reason("AgentSilent", "Unknown", _SERVICE),
        Reason("SomeNotReady", "False", "see trackbed status --devices on the node"),
    ),
    UP_TO_DATE: (Reason("SpecDone"), Reason("AgentSilent", "Unknown", _SERVICE), Reason("NotYet", "False")),
}
"""By the type of the condition. The Node's conditions also have the reasons of the report's."""


def declared(type: str, name: str) -> Reason | None:
    """The reason of a condition; None if nobody declares it, as in the report of another version."""
    return next((each for each in (*REASONS.get(type, ()), *REASONS[ANY]) if each.name == name), None)


def condition(
    type: str,
    name: str,
    message: str = "",
    *,
    severity: Severity = "required",
    more: str = "",
    faults: Iterable[FunctionFault] = (),
) -> Condition:
    """A condition with the status and the remedy of its reason. ``more`` is added to the remedy."""
    known = declared(type, name)
    if known is None:
        raise LookupError(f"{type} has no reason {name} in agent/report/reasons.py")
    remedy = f"{known.remedy}{more}"
    return Condition(type, known.status, name, message, severity=severity, remedy=remedy, faults=tuple(faults))
