"""What a node should be by its spec, and its state by the distribution's own tools. The agent is not used."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable
from functools import cached_property
from typing import Any, NoReturn

import pytest
from attrs import field, frozen
from testinfra.host import Host

from agent.driver_families import family_of
from agent.spec.nic import Nic as WantedNic
from agent.spec.nic import VfAttributes
from agent.spec.node import NodeSpec, parse
from agent.spec.ranges import format_ranges
from agent.spec.selector import Selector
from agent.spec.validators import MAC
from agent.state.wanted import derived_mac
from tests.node.cpus import Cpus, read_cpus

__all__ = ["Finding", "Host", "Nic", "Node", "Vf", "equal", "judge", "read_node"]

SPEC = "/etc/trackbed/node.json"

# One line a function: what it is called by, in each of the ways in which a spec may select it, and each of its VFs. The netdev
# of a function is that of its first port, and no representor.
FUNCTIONS = """
link() { if [ -e "$1" ]; then basename "$(readlink "$1")"; else echo -; fi; }
netdev() {
  own=$(for n in "$1"/net/* "$1"/virtio*/net/*; do
    if [ ! -e "$n" ]; then continue; fi
    case "$(cat "$n/phys_port_name" 2>/dev/null)" in *pf*|[0-9]*) continue ;; esac
    echo "$(cat "$n/dev_port" 2>/dev/null || echo 0) $(cat "$n/ifindex") ${n##*/}"
  done | sort -n -k1,1 -k2,2 | head -n 1)
  echo "${own:--}" | sed 's/.* //'
}
for d in /sys/bus/pci/devices/*; do
  read -r class < "$d/class"
  case "$class" in 0x02*) ;; *) continue ;; esac
  if [ -e "$d/physfn" ]; then continue; fi
  read -r vendor < "$d/vendor"; read -r device < "$d/device"; read -r node < "$d/numa_node"
  net=$(netdev "$d"); permanent=-
  if [ "$net" != - ]; then permanent=$(ethtool -P "$net" | sed 's/.*: //'); fi
  bridge=-
  case "$vendor $class" in "0x15b3 0x0207"*) if grep -aqs SMDL=SW_MNG "$d/vpd"; then bridge=NVLink; fi ;; esac
  echo "pf|${d##*/}|${vendor#0x}|${device#0x}|$(link "$d/driver")|$net|$node|$permanent|$bridge"
  for v in "$d"/virtfn*; do
    if [ -e "$v" ]; then echo "vf|${v##*virtfn}|$(link "$v")|$(netdev "$v")"; fi
  done
done
"""

# The netdevs of every other network namespace: named ones, and those that a process lives in.
_ELSEWHERE = """
own=$(stat -Lc %i /proc/self/ns/net); seen=
for n in /run/netns/* /proc/[0-9]*/ns/net; do
  inode=$(stat -Lc %i "$n" 2>/dev/null) || continue
  case " $own $seen " in *" $inode "*) continue ;; esac
  seen="$seen $inode"
  echo "$n"; nsenter --net="$n" ip -j -d link; echo
done
"""

# Per interrupt of each PCI function: its number, the CPUs that may serve it, where it arrives. Then /proc/interrupts.
_INTERRUPTS = """
for pci; do
  for file in /sys/bus/pci/devices/"$pci"/msi_irqs/*; do
    irq=/proc/irq/${file##*/}
    if [ -r "$irq"/effective_affinity_list ]; then
      read -r affinity < "$irq"/smp_affinity_list; read -r effective < "$irq"/effective_affinity_list
      echo "$pci|${file##*/}|$affinity|$effective"
    fi
  done
done
cat /proc/interrupts
"""


@frozen
class Finding:
    """One fact that was checked."""

    device: str
    what: str
    expected: object
    actual: object
    ok: bool


def equal(device: str, what: str, expected: object, actual: object) -> Finding:
    """The two are the same."""
    return Finding(device, what, expected, actual, expected == actual)


def judge(node: Node, findings: Iterable[Finding], nothing: str) -> None:
    """Fail with every finding that is not as expected, one line each; skip if there was nothing to check."""
    __tracebackhide__ = True
    checked = list(findings)
    if not checked:
        pytest.skip(f"{node.name}: {nothing}")
    wrong = [f"{node.name}: {f.device}: {f.what}: expected {f.expected}, found {f.actual}" for f in checked if not f.ok]
    if wrong:
        pytest.fail("\n".join(wrong), pytrace=False)


@frozen
class Vf:
    """A VF, and its attributes by the spec. ``taken``: the namespace that it was moved to; its netdev does not count."""

    index: int
    pci: str
    netdev: str | None
    taken: str | None
    want: VfAttributes
    label: str


@frozen
class Nic:
    """A NIC of the spec, and the physical function that it means."""

    want: WantedNic
    pci: str
    netdev: str
    numa_node: int
    vfs: tuple[Vf, ...]
    label: str

    def functions(self) -> list[tuple[str, str, str]]:
        """PCI address, netdev and label of the PF and of the VFs that are in the host's namespace."""
        own = [(vf.pci, vf.netdev, vf.label) for vf in self.vfs if vf.netdev is not None]
        return [(self.pci, self.netdev, self.label), *own]


@frozen
class Interrupt:
    """``queue`` is None for one that serves no queue."""

    number: int
    name: str
    queue: int | None
    affinity: str
    effective: str
    count: int


def _queues(driver: str, names: list[str]) -> list[int | None]:
    """The queue of each interrupt of one function by its name, in the order of their numbers.

    What a family calls them, and what it counts, is in its record: a fact, and nothing that the agent does.
    """
    family = family_of(driver)
    matches = [family.queue_irqs.search(name) for name in names]
    named = sum(match is not None for match in matches)
    of_role: Counter[str] = Counter()
    served: list[tuple[str, int] | None] = []
    for match in matches:
        if match is None:
            served.append(None)
            continue
        role = match["role"] or ""
        number = int(match.groupdict().get("queue") or of_role[role])
        of_role[role] += 1
        queue = family.queue(role, number, named)
        # A second interrupt of that name serves no queue of the netdev.
        served.append(None if queue in served else queue)
    return [queue[1] if queue is not None else None for queue in served]


@frozen(slots=False)
class Node:
    """A node under test."""

    host: Host
    name: str
    spec: NodeSpec
    text: str = field(repr=False)

    def run(self, script: str, *arguments: str) -> str:
        """What a shell script prints on the node; its failure is the check's."""
        __tracebackhide__ = True
        # Some programs, such as stat, translate what they print.
        done = self.host.run("LC_ALL=C sh -uc %s -- " + " ".join(["%s"] * len(arguments)), script, *arguments)
        if done.rc != 0:
            self.fail(
                f"`{script.strip().splitlines()[0]}` ended with {done.rc}: {(done.stderr or done.stdout).strip()}"
            )
        return str(done.stdout)

    def fail(self, message: str) -> NoReturn:
        """Fail without a traceback."""
        pytest.fail(f"{self.name}: {message}", pytrace=False)

    @cached_property
    def links(self) -> dict[str, dict[str, Any]]:
        """`ip -d link` by name, VFs included."""
        return {link["ifname"]: link for link in json.loads(self.run("ip -j -d link"))}

    @cached_property
    def drivers(self) -> dict[str, str]:
        """The driver of each PCI function, by lspci."""
        drivers = {}
        for block in self.run("lspci -Dvmmnk").split("\n\n"):
            fields = dict(line.split(":\t", 1) for line in block.splitlines() if ":\t" in line)
            if "Driver" in fields:
                drivers[fields["Slot"]] = fields["Driver"]
        return drivers

    @cached_property
    def elsewhere(self) -> dict[str, str]:
        """The network namespace of each PCI function whose netdev was moved out of the host's."""
        namespaces: dict[str, str] = {}
        namespace = ""
        for line in self.run(_ELSEWHERE).splitlines():
            if line.startswith("/"):
                namespace = line
            elif line:
                namespaces |= {link["parentdev"]: namespace for link in json.loads(line) if "parentdev" in link}
        return namespaces

    @cached_property
    def cpus(self) -> Cpus:
        """The node's CPUs."""
        return read_cpus(self.run, self.spec.irqs.exclude_cpus)

    @cached_property
    def interrupts(self) -> dict[str, list[Interrupt]]:
        """The interrupts that each function's driver has requested, by its PCI address."""
        return self.read_interrupts()

    def read_interrupts(self) -> dict[str, list[Interrupt]]:
        """Read them now, by /proc/interrupts and /proc/irq."""
        affinities: list[list[str]] = []
        counters: dict[str, list[str]] = {}
        for line in self.run(_INTERRUPTS, *self.drivers).splitlines():
            if "|" in line:
                affinities.append(line.split("|"))
            elif (words := line.split())[0].endswith(":"):
                counters[words[0][:-1]] = words[1:]
        requested: dict[str, list[tuple[int, str, str, list[str]]]] = {}
        for pci, number, affinity, effective in affinities:
            # An interrupt that nobody has requested is not listed there.
            if words := counters.get(number, []):
                requested.setdefault(pci, []).append((int(number), affinity, effective, words))
        interrupts: dict[str, list[Interrupt]] = {}
        for pci, listed in requested.items():
            listed.sort(key=lambda each: each[0])
            queues = _queues(self.drivers.get(pci, ""), [words[-1] for *_, words in listed])
            for (irq, affinity, effective, words), queue in zip(listed, queues, strict=True):
                count = sum(int(word) for word in words[: len(self.cpus.core)])
                interrupts.setdefault(pci, []).append(Interrupt(irq, words[-1], queue, affinity, effective, count))
        return interrupts

    def nics(self) -> tuple[Nic, ...]:
        """The NICs of the spec, by their selectors. Fail if a required NIC is missing, or its selector is not unique."""
        __tracebackhide__ = True
        functions = self._functions()
        nics = []
        for want in self.spec.nics:
            chosen = [pf for pf in functions if self._selected(want.select, pf)]
            if want.select.each:
                nics += self._members(want, chosen)
            elif len(chosen) == 1 and chosen[0]["netdev"] is not None:
                nics.append(self._nic(want, chosen[0]))
            elif want.required or len(chosen) == 1:
                have = ", ".join(f"{pf['pci']} ({pf['netdev'] or 'no netdev'})" for pf in chosen or functions)
                self.fail(
                    f"NIC {want.name} ({want.select}): expected one function with a netdev, found {have or 'none'}"
                )
        return tuple(nics)

    def _members(self, entry: WantedNic, chosen: list[dict[str, Any]]) -> list[Nic]:
        """The NICs of an entry with ``each``: as many as it allows, numbered by their PCI addresses."""
        __tracebackhide__ = True
        select = entry.select
        others = [nic.select for nic in self.spec.nics if nic.name in select.without]
        nics = [pf for pf in chosen if pf["bridge"] is None]
        left = [pf for pf in nics if not any(self._selected(other, pf) for other in others)]
        lacking = [pf["pci"] for pf in left if pf["netdev"] is None]
        as_many = (select.min or 1) <= len(left) <= (select.max or len(left))
        if not as_many and not entry.required:
            return []
        if not as_many or (lacking and entry.required):
            have = ", ".join(f"{pf['pci']} ({pf['netdev'] or 'no netdev'})" for pf in left)
            self.fail(f"NIC {entry.name} ({select}): found {have or 'none'}, each of which must have a netdev")
        by_address = enumerate(sorted(left, key=lambda pf: str(pf["pci"])))
        return [self._nic(entry.member(index, pf["pci"]), pf) for index, pf in by_address if pf["netdev"] is not None]

    def _functions(self) -> list[dict[str, Any]]:
        functions: list[dict[str, Any]] = []
        for line in self.run(FUNCTIONS).splitlines():
            kind, *words = (None if word == "-" else word for word in line.split("|"))
            if kind == "pf":
                keys = ("pci", "vendor", "device", "driver", "netdev", "numa_node", "permanent", "bridge")
                functions.append({**dict(zip(keys, words, strict=True)), "vfs": {}})
            else:
                functions[-1]["vfs"][int(str(words[0]))] = (words[1], words[2])
        return functions

    def _selected(self, selector: Selector, pf: dict[str, Any]) -> bool:
        names = [pf["netdev"], *self.links.get(pf["netdev"], {}).get("altnames", ())]
        return all(
            wanted is None or wanted in have
            for wanted, have in (
                (selector.pci, [pf["pci"]]),
                (selector.mac, [pf["permanent"]]),
                (selector.netdev, names),
                (selector.vendor, [pf["vendor"]]),
                (selector.device, [pf["device"]]),
                (selector.driver, [pf["driver"]]),
                (selector.serial, self._serials(pf["pci"]) if selector.serial else []),
            )
        )

    def _serials(self, pci: str) -> list[str]:
        """By lspci: of the configuration space, and of the Vital Product Data."""
        text = self.run('lspci -vvs "$1"', pci)
        return re.findall(r"(?:Device Serial Number|\[SN\] Serial number:) (\S+)", text)

    def _nic(self, want: WantedNic, pf: dict[str, Any]) -> Nic:
        label = f"{pf['netdev']} ({pf['pci']}, NIC {want.name})"
        vfs = []
        for index, (pci, netdev) in sorted(pf["vfs"].items()):
            expected = _expected(want, index, pf["permanent"])
            taken = self.elsewhere.get(pci) if netdev is None else None
            vfs.append(
                Vf(index, pci, netdev, taken, expected, f"{netdev or 'VF'} ({pci}, NIC {want.name}, VF {index})")
            )
        return Nic(want, pf["pci"], pf["netdev"], int(pf["numa_node"]), tuple(vfs), label)


def _expected(nic: WantedNic, index: int, permanent: str) -> VfAttributes:
    """What a VF should be by the documented rules: its group's values, the NIC's defaults, the PF's MTU and state."""
    if nic.vfs is None or index >= nic.vfs.count:
        return VfAttributes()
    given = nic.vfs.attributes(index)
    derived = nic.vfs.derive_macs and MAC.fullmatch(permanent)
    mac = given.mac or (derived_mac(permanent, index) if derived else None)
    return given.having(mac=mac, mtu=given.mtu or nic.mtu, state=given.state or nic.state)


def one_of(cpus: Iterable[int]) -> str:
    """CPUs as an expectation reads."""
    return f"one of {format_ranges(cpus)}"


def read_node(host: Host) -> Node:
    """A node by its spec file; fails if it has none."""
    __tracebackhide__ = True
    name = str(host.backend.get_pytest_id()).partition("://")[2]
    done = host.run("cat %s", SPEC)
    if done.rc != 0:
        pytest.fail(f"{name}: {done.stderr.strip()}; deploy it first", pytrace=False)
    return Node(host, name, parse(done.stdout, f"{name}:{SPEC}"), done.stdout)
