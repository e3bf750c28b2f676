"""The faults: the scripts that begin and end each, and the states that each may change."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count

from attrs import field, frozen

from lab import MACHINES, Node
from tests.boots import reboot

FIRST, SECOND = MACHINES[0].nics
DEVICE = f"/sys/bus/pci/devices/{FIRST.pci}"
OTHER = f"/sys/bus/pci/devices/{SECOND.pci}"
PF, VF = FIRST.netdev, f"{FIRST.netdev}v2"
# No slash in a name, so that pkill does not find its own shell by it.
WORKER, SUPERVISOR, REPORTER = "'[t]rackbed.* worker'", "'[t]rackbed.* run'", "'[t]rackbed.* reporter'"
STATE = "/var/lib/trackbed"
RUN = "/run/trackbed"
SPEC = "/etc/trackbed/node.json"
HOLDER = "chaos-holder"
# Beside a fault that removes the VF, nothing could be opened.
CLOSE = f"systemctl stop {HOLDER} || true"
RDMA = f"rdma link | sed -n 's,^link \\([^/]*\\)/.* netdev {VF} .*,\\1,p'"
"""Prints the name of the VF's RDMA device, which rdma-core's rules choose."""

Host = Callable[[Node, random.Random], None]


@frozen
class Fault:
    """One fault. ``begin`` and ``end`` are scripts on the node; ``host`` runs on the host instead of ``begin``.

    ``holds``: seconds between both. ``keeps_vfs``: whether the VFs, and so one in use, are there all the time.
    ``repair_disturbs``: the repair disturbs the VF in use, so the agent has to wait until the VF is back.
    ``unclaimed``: the PCI address of a VF that the fault binds to another driver. The lab's spec gives no driver, so the agent
    leaves that VF alone, and the node may be ready meanwhile.
    ``silences``: the agent cannot answer while it lasts, so readers trust the report until its heartbeat is stale.
    ``mutes``: the reporter cannot publish while it lasts, and may wait for a while before it tries again.
    ``needs``: a script that fails on a node on which the fault cannot be tried.
    """

    name: str
    group: str
    begin: str = ""
    end: str = ""
    holds: float = 0.0
    keeps_vfs: bool = True
    repair_disturbs: bool = False
    unclaimed: str = ""
    silences: bool = False
    mutes: bool = False
    reboots: bool = False
    needs: str = ""
    host: Host | None = field(default=None, repr=False)


def _cut(node: Node, chance: random.Random) -> None:
    node.power_cut()
    node.boot()


def _cut_in_an_apply(node: Node, chance: random.Random) -> None:
    """Cut the power at a random moment of the making of all VFs."""
    node.sh(f"setsid sh -c 'echo 0 > {DEVICE}/sriov_numvfs; sleep {chance.uniform(0.0, 8.0):.2f}' >/dev/null 2>&1")
    _cut(node, chance)


def _reboot(node: Node, chance: random.Random) -> None:
    reboot(node)


def _kill_in_an_apply(node: Node, chance: random.Random) -> None:
    later = chance.uniform(0.0, 8.0)
    node.sh(f"echo 0 > {DEVICE}/sriov_numvfs; sleep {later:.2f}; pkill -9 -f {WORKER}", timeout=120)


def _drift(name: str, command: str, again: int = 1) -> Fault:
    """A value that another program changes, three times at most: after five times the agent gives it up, by design."""
    group = "a value changed" if again == 1 else "a value changed, again and again"
    script = f"for i in $(seq {again}); do {command}; sleep 0.5; done"
    # igb resets the port for its MTU, and with it all VFs.
    return Fault(name, group, script, repair_disturbs=command == DRIFTS["MTU of a PF"])


def _rename(name: str, other: str) -> str:
    """Rename a netdev. The agent sets it up again as soon as it is down, and a netdev that is up keeps its name."""
    lines = f"link set {name} down\\nlink set {name} name {other}\\nlink set {other} up\\n"
    return f"for i in $(seq 20); do printf '{lines}' | ip -batch - && break; sleep 0.1; done"


def _file(name: str, path: str, command: str, restart: bool = True) -> Fault:
    """A damaged file. The agent then restarts, as after a crash, and reads it. The deploy's files are restored at the end."""
    begin = f"cp -p {path} /root/kept 2>/dev/null || true; {command}" + (
        "; systemctl restart trackbed" if restart else ""
    )
    end = f"if [ -e /root/kept ]; then mv /root/kept {path}; fi; systemctl reload-or-restart trackbed"
    return Fault(name, "a file damaged", begin, end if path == SPEC else "rm -f /root/kept", 3.0, silences=True)


def _stopped(who: str, process: str, silences: bool = False) -> Fault:
    """systemd's watchdog may end it meanwhile. Then there is nothing to continue for a moment."""
    begin, end = f"pkill -STOP -f {process}", f"pkill -CONT -f {process} || true"
    return Fault(f"{who} is stopped for 20 s", "a process", begin, end, 20.0, silences=silences)


def _open(device: str) -> str:
    """Have a program hold a device open, until its unit is stopped."""
    return f'systemd-run --quiet --collect --unit={HOLDER} sh -c "exec sleep 3600 3<>{device}"'


DRIFTS = {
    "MTU of a VF": f"ip link set {VF} mtu 1500",
    "MTU of a PF": f"ip link set {PF} mtu 8000",
    "a VF down": f"ip link set {VF} down",
    "a PF down": f"ip link set {PF} down",
    "trust of a VF": f"ip link set {PF} vf 2 trust off",
    "spoofchk of a VF": f"ip link set {SECOND.netdev} vf 2 spoofchk off",
    "VLAN of a VF": f"ip link set {SECOND.netdev} vf 0 vlan 7",
    "MAC granted to a VF": f"ip link set {PF} vf 3 mac 02:00:00:00:00:77",
    "txqueuelen": f"ip link set {PF} txqueuelen 100",
    "an alternative name": f"ip link property del dev {PF} altname {FIRST.name}",
    "RPS of a queue": f"echo 0 > /sys/class/net/{VF}/queues/rx-0/rps_cpus",
    "interrupt affinity": f"echo 0-3 > /proc/irq/$(ls {DEVICE}/msi_irqs | tail -1)/smp_affinity_list",
    "coalescing": f"ethtool -C {PF} rx-usecs 200",
    "a sysctl": "sysctl -qw net.ipv4.conf.all.arp_ignore=0",
}

FAULTS = (
    Fault("the worker is killed", "a process", f"pkill -9 -f {WORKER}"),
    Fault("the supervisor is killed", "a process", f"pkill -9 -f {SUPERVISOR}"),
    Fault("the reporter is killed", "a process", f"pkill -9 -f {REPORTER}", mutes=True),
    Fault("all are killed", "a process", "pkill -9 -f '[/]opt/trackbed'", silences=True, mutes=True),
    Fault("the worker is killed in the making of VFs", "a process", keeps_vfs=False, host=_kill_in_an_apply),
    _stopped("the worker", WORKER),
    _stopped("the supervisor", SUPERVISOR, silences=True),
    Fault("the unit is restarted", "a process", "systemctl restart trackbed"),
    Fault("power cut", "power", keeps_vfs=False, reboots=True, host=_cut),
    Fault("power cut in the making of VFs", "power", keeps_vfs=False, reboots=True, host=_cut_in_an_apply),
    Fault("reboot", "power", keeps_vfs=False, reboots=True, host=_reboot),
    Fault("all VFs of a PF deleted", "a device", f"echo 0 > {DEVICE}/sriov_numvfs", keeps_vfs=False),
    Fault(
        "another number of VFs",
        "a device",
        f"echo 0 > {DEVICE}/sriov_numvfs; echo 3 > {DEVICE}/sriov_numvfs || true",
        keeps_vfs=False,
    ),
    Fault(
        "all VFs of both PFs deleted",
        "a device",
        f"echo 0 > {DEVICE}/sriov_numvfs & echo 0 > {OTHER}/sriov_numvfs; wait",
        keeps_vfs=False,
    ),
    Fault(
        "a PF unbound for 5 s",
        "a device",
        f"echo {FIRST.pci} > /sys/bus/pci/drivers/igb/unbind",
        f"echo {FIRST.pci} > /sys/bus/pci/drivers/igb/bind",
        5.0,
        keeps_vfs=False,
    ),
    Fault("the PFs' driver reloaded", "a device", "modprobe -r igb; modprobe igb", keeps_vfs=False),
    Fault("the VFs' driver reloaded", "a device", "modprobe -r igbvf; modprobe igbvf", keeps_vfs=False),
    Fault(
        "a PF removed from the bus for 5 s",
        "a device",
        f"echo 1 > {DEVICE}/remove",
        "echo 1 > /sys/bus/pci/rescan",
        5.0,
        keeps_vfs=False,
    ),
    Fault(
        "a VF bound anew",
        "a device",
        f"vf=$(basename $(readlink {DEVICE}/virtfn2)); echo $vf > {DEVICE}/virtfn2/driver/unbind;"
        " echo $vf > /sys/bus/pci/drivers_probe",
    ),
    Fault(
        "a PF renamed for 5 s",
        "a device",
        _rename(PF, "other0"),
        # udev gives a renamed netdev its usual name as an alternative one, and the kernel then refuses it as the name.
        f"ip link property del dev other0 altname {PF} || true; {_rename('other0', PF)}",
        5.0,
    ),
    Fault("a VF renamed", "a device", _rename(VF, "other1")),
    Fault(
        "a CPU offline for 5 s",
        "a device",
        "echo 0 > /sys/devices/system/cpu/cpu3/online",
        "echo 1 > /sys/devices/system/cpu/cpu3/online",
        5.0,
    ),
    *(_drift(name, command) for name, command in DRIFTS.items()),
    *(_drift(f"{name}, three times", command, 3) for name, command in DRIFTS.items()),
    Fault(
        "400 netdevs made and deleted",
        "the kernel's queues",
        "for i in $(seq 400); do echo link add dummy$i type dummy; done | ip -batch -"
        "; for i in $(seq 400); do echo link del dummy$i; done | ip -batch -",
    ),
    # Each event causes a pass that reads that VF only.
    Fault(
        "an event of a VF every 10 s for 90 s, and RPS of another changed",
        "the kernel's queues",
        f"systemd-run --quiet --collect --unit={HOLDER}"
        f" sh -c 'while sleep 10; do ip address replace 192.0.2.99/32 dev {VF}; done';"
        f" echo 0 > /sys/class/net/{SECOND.netdev}v0/queues/rx-0/rps_cpus",
        f"{CLOSE}; ip address del 192.0.2.99/32 dev {VF} || true",
        90.0,
    ),
    Fault(
        "/run full for 5 s",
        "a file system",
        "fallocate -l 10G /run/filled || dd if=/dev/zero of=/run/filled bs=1M",
        "rm /run/filled",
        5.0,
    ),
    Fault(
        "/ full for 5 s",
        "a file system",
        "fallocate -l $(($(df --output=avail -B1 / | tail -1) - 4096)) /filled",
        "rm /filled",
        5.0,
    ),
    Fault("/ read-only for 5 s", "a file system", "echo u > /proc/sysrq-trigger", "mount -o remount,rw /", 5.0),
    _file("the spec truncated", SPEC, f"truncate -s 100 {SPEC}"),
    _file("the spec of random bytes", SPEC, f"head -c 4096 /dev/urandom > {SPEC}"),
    _file("the spec deleted", SPEC, f"rm {SPEC}"),
    _file("the originals truncated", f"{RUN}/originals.jsonl", f"truncate -s 100 {RUN}/originals.jsonl"),
    _file(
        "the originals of random bytes", f"{RUN}/originals.jsonl", f"head -c 4096 /dev/urandom > {RUN}/originals.jsonl"
    ),
    _file(
        "the verified spec of random bytes",
        f"{STATE}/verified.json",
        f"head -c 4096 /dev/urandom > {STATE}/verified.json",
    ),
    _file("the report deleted", f"{RUN}/report.json", f"rm {RUN}/report.json", restart=False),
    Fault(
        "the clock a day ahead for 5 s", "the clock", "date -s '+1 day' >/dev/null", "date -s '-1 day' >/dev/null", 5.0
    ),
    Fault(
        "the clock a year back for 5 s",
        "the clock",
        "date -s '-1 year' >/dev/null",
        "date -s '+1 year' >/dev/null",
        5.0,
        # The API server's certificate is not valid yet then.
        mutes=True,
    ),
    Fault("memory until the OOM killer acts", "memory", "tail /dev/zero || true"),
    *(
        Fault(f"{unit} stopped for 5 s", "another service", f"systemctl stop {stop}", f"systemctl start {unit}", 5.0)
        for unit, stop in (
            ("systemd-udevd", "systemd-udevd systemd-udevd-control.socket systemd-udevd-kernel.socket"),
            ("dbus", "dbus.socket dbus"),
        )
    ),
    # networkd removes the addresses that it got by DHCP, so nobody can log in to start it again.
    Fault(
        "systemd-networkd stopped for 5 s",
        "another service",
        "systemctl stop systemd-networkd.socket systemd-networkd; sleep 5; systemctl start systemd-networkd",
    ),
    Fault(
        "irqbalance started against us for 15 s",
        "another service",
        "systemctl start irqbalance",
        "systemctl stop irqbalance",
        15.0,
    ),
    # It takes the PFs' IPv6 link-local addresses, which the lab's spec leaves alone, and does not give them back.
    Fault(
        "NetworkManager started against us for 15 s",
        "another service",
        "systemctl start NetworkManager",
        f"systemctl stop NetworkManager; for pf in {PF} {SECOND.netdev}; do ip link set $pf addrgenmode eui64; done",
        15.0,
        needs="systemctl cat NetworkManager",
    ),
    Fault(
        "a VF bound to vfio and open for 10 s",
        "a VF in use",
        f"modprobe vfio-pci; vf=$(basename $(readlink {DEVICE}/virtfn3)); echo vfio-pci > {DEVICE}/virtfn3/driver_override;"
        f" echo $vf > {DEVICE}/virtfn3/driver/unbind; echo $vf > /sys/bus/pci/drivers_probe;"
        f" {_open(f'/dev/vfio/$(basename $(readlink {DEVICE}/virtfn3/iommu_group))')}",
        # The agent does not take the VF back (see unclaimed), so the fault does, as libvirt would.
        f"{CLOSE}; vf={DEVICE}/virtfn3;"
        ' if [ "$(basename "$(readlink $vf/driver)")" = vfio-pci ]; then pci=$(basename $(readlink $vf));'
        " echo > $vf/driver_override; echo $pci > $vf/driver/unbind; echo $pci > /sys/bus/pci/drivers_probe; fi",
        10.0,
        unclaimed=FIRST.vf_pcis[3],
        needs=f"test -e {DEVICE}/virtfn3/iommu_group && modprobe vfio-pci",
    ),
    Fault(
        "a VF's RDMA device held by a program for 10 s",
        "a VF in use",
        f'device=$(grep -lx "$({RDMA})" /sys/class/infiniband_verbs/uverbs*/ibdev | cut -d/ -f5);'
        f" {_open('/dev/infiniband/$device')}",
        CLOSE,
        10.0,
        needs=f'modprobe ib_uverbs && test -n "$({RDMA})"',
    ),
)

PAIRS = 0.25
"""How many of the trials are of two faults at once."""

Trial = tuple[int, tuple[Fault, ...]]
"""The number of a trial in its seed, and its faults. It does not depend on what a node can do."""


def trials(seed: int, chosen: Sequence[Fault]) -> Iterator[Trial]:
    """The trials of a seed, without end: every fault comes once before any comes again, some together with a second one."""
    chance = random.Random(seed)  # noqa: S311  the same trials each time
    deck: list[Fault] = []
    for number in count(1):
        if not deck:
            deck = chance.sample(chosen, len(chosen))
        first = deck.pop()
        others = [fault for fault in chosen if fault.host is None and fault.name != first.name]
        # A fault that the host makes ends what was begun before it.
        pair = others and first.host is None and chance.random() < PAIRS
        yield number, (first, chance.choice(others)) if pair else (first,)
