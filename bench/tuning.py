"""Measures what placing interrupts, RPS and NAPI's settings gain on each path of packets: `python -m bench.tuning`.

Two hosts exchange small requests from PF to PF, and between two network namespaces, as containers have them: by a bridge, by
macvlan, and by a VF of their own. Each path is measured as a kernel and its drivers leave interrupts and queues (each interrupt
on any CPU, neither RPS nor XPS), as the agent placed them, and then also with interrupts deferred or NAPI in threads. A program
that spins on a CPU with interrupts of the client's netdev notes how long it did not run: beside interrupts as placed, and once
that CPU has an owner, a cgroup that is a cpuset partition. The hosts are two nodes of the lab, whose emulated CPUs make the
differences small, or two servers of yours (`--hosts`) that have an agent and no jobs: the PF carries nothing else meanwhile.
"""

from __future__ import annotations

import inspect
import json
import shlex
import subprocess
from collections.abc import Sequence
from typing import Protocol

import click
from attrs import frozen

import lab
from bench import exchange
from bench.comparison import compare, options
from bench.nodes import nodes

NAME = "tuning"
PF = lab.MACHINES[0].nics[0].netdev
IN = "ip netns exec tuning"

AS_FOUND = """
for irq in /sys/class/net/{pf}/device/msi_irqs/* /sys/class/net/{pf}/device/virtfn0/msi_irqs/*; do
  echo 0-$(($(nproc) - 1)) > /proc/irq/${{irq##*/}}/smp_affinity_list 2>/dev/null || true
done
"""

# A netdev with one queue has no XPS: its file refuses every write.
NO_STEERING = """
for mask in /sys/class/net/{pf}/queues/*/?ps_cpus /sys/class/net/{vf}/queues/*/?ps_cpus; do
  if [ -e $mask ]; then echo 0 > $mask 2>/dev/null || true; fi
done
"""


def _napi(defer: int, timeout_ns: int, threaded: int) -> str:
    values = {"napi_defer_hard_irqs": defer, "gro_flush_timeout": timeout_ns, "threaded": threaded}
    return "".join(
        f"for file in /sys/class/net/{{pf}}/{name} /sys/class/net/{{vf}}/{name}; do\n"
        f"  if [ -e $file ]; then echo {value} > $file; fi\ndone\n"
        for name, value in values.items()
    )


@frozen
class Setting:
    """``script`` runs after the agent has placed everything. It runs in the namespace of the path, too, since /sys shows the
    netdevs of one namespace.

    ``spin``: a program spins on a CPU of the client that serves a queue of the path's netdev, and the client's other CPUs send
    the requests. ``owned``: that CPU has an owner.
    """

    name: str
    script: str = ""
    spin: bool = False
    owned: bool = False


SETTINGS = (
    Setting("as found", NO_STEERING),
    Setting("as placed"),
    Setting("as placed, deferred NAPI", _napi(2, 20000, 0)),
    Setting("as placed, threaded NAPI", _napi(0, 0, 1)),
    Setting("beside a spinning program: as placed", spin=True),
    Setting("beside it: its CPU has an owner", spin=True, owned=True),
)

GROUP = "/sys/fs/cgroup/tuning"
"""The cgroup that owns a CPU."""

# The kernel accepts a partition that cannot be one, and its file then says why it is invalid.
OWN = """
echo +cpuset > /sys/fs/cgroup/cgroup.subtree_control; mkdir {group}; echo {cpu} > {group}/cpuset.cpus
echo root > {group}/cpuset.cpus.partition
grep -qx root {group}/cpuset.cpus.partition || {{{{ cat {group}/cpuset.cpus.partition >&2; exit 1; }}}}
"""

# While the program spins, the group has a process and cannot be removed.
DISOWN = f"until [ ! -e {GROUP} ] || rmdir {GROUP} 2>/dev/null; do sleep 0.2; done"

# The interrupts of queues have one CPU each, others have more.
SERVING = """
for irq in /sys/class/net/{netdev}/device/msi_irqs/*; do cat /proc/irq/${{{{irq##*/}}}}/smp_affinity_list; done |
  grep -x '[0-9]*' | sort -n | tail -n 1
"""


class Host(Protocol):
    """A host on which commands run as root."""

    def run(
        self, argv: Sequence[str], timeout: float = 60.0, *, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a command. With `check` a failure is an error."""
        ...


@frozen
class Server:
    """A server that ssh reaches as root by this name."""

    name: str

    def run(
        self, argv: Sequence[str], timeout: float = 60.0, *, check: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a command by ssh. With `check` a failure ends the benchmark."""
        words = ["ssh", "-o", "BatchMode=yes", "-l", "root", "--", self.name, shlex.join(argv)]
        done = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout, check=False
        )
        if check and done.returncode:
            raise click.ClickException(f"{self.name}: {shlex.join(argv)[:80]}: {done.stderr.strip()[-500:]}")
        return done


@frozen
class End:
    """A host with the names of its PF and of its first VF, and the address that it has on each path."""

    host: Host
    pf: str
    vf: str
    ip: str

    @classmethod
    def of(cls, host: Host, pf: str, ip: str) -> End:
        """Read the VF's name on the host."""
        vfs = host.run(["ls", f"/sys/class/net/{pf}/device/virtfn0/net"], check=True).stdout.split()
        if not vfs:
            raise click.ClickException(f"the first VF of {pf} has no netdev; `trackbed status` says why")
        return cls(host, pf, vfs[0], ip)

    def sh(self, script: str, timeout: float = 60.0, *, prefix: str = "") -> str:
        """Run a shell script with `{pf}`, `{vf}` and `{ip}` filled in, perhaps in a namespace; return what it prints."""
        text = script.format(pf=shlex.quote(self.pf), vf=shlex.quote(self.vf), ip=self.ip)
        try:
            return self.host.run([*prefix.split(), "sh", "-euc", text], timeout, check=True).stdout
        except lab.LabError as error:
            raise click.ClickException(str(error)) from None


@frozen
class PacketPath:
    """A path between the hosts: scripts that create and remove its end, where programs run, and its netdev with interrupts."""

    name: str
    make: str
    remove: str
    prefix: str = IN
    netdev: str = "{pf}"


def _inside(netdev: str) -> str:
    return f"{IN} ip address add {{ip}}/24 dev {netdev}; {IN} ip link set {netdev} up"


MAC = f"$({IN} cat /sys/class/net/eth0/address)"

# Two traps of a bridge on a PF. The PF may drop packets whose destination is the namespace's MAC (igb with VFs does, even if
# promiscuous): it is told that MAC. A broadcast may come back to its sender (in the lab it does), and the bridge would learn
# from it that the namespace is outside: its port to the PF does not learn.
BRIDGE_PORT = f"bridge link set dev {{pf}} learning off; bridge fdb add {MAC} dev {{pf}} self"

PATHS = (
    PacketPath("PF to PF", "ip address add {ip}/24 dev {pf}", "ip address del {ip}/24 dev {pf}", ""),
    PacketPath(
        "bridge",
        "ip netns add tuning; ip link add tuning-br type bridge; ip link set {pf} master tuning-br; ip link set tuning-br up"
        "; ip link add tuning-out type veth peer name eth0 netns tuning; ip link set tuning-out master tuning-br up"
        f"; {_inside('eth0')}; {BRIDGE_PORT}",
        f"bridge fdb del {MAC} dev {{pf}} self; ip netns del tuning; ip link del tuning-br",
    ),
    PacketPath(
        "macvlan",
        f"ip netns add tuning; ip link add link {{pf}} name eth0 netns tuning type macvlan mode bridge; {_inside('eth0')}",
        "ip netns del tuning",
    ),
    PacketPath(
        "a VF",
        f"ip netns add tuning; ip link set {{vf}} netns tuning; {_inside('{vf}')}",
        f"{IN} ip link set {{vf}} netns 1; ip netns del tuning; ip link set {{vf}} up",
        netdev="{vf}",
    ),
)


def _cpus(client: End, path: PacketPath) -> tuple[str, str]:
    """The last CPU that serves a queue of the path's netdev, and the client's other CPUs."""
    spinning = client.sh(SERVING.format(netdev=path.netdev)).strip()
    if not spinning:
        raise click.ClickException(f"path {path.name}: no queue has its interrupt on one CPU; see: trackbed inspect")
    others = [str(cpu) for cpu in range(int(client.sh("nproc --all"))) if str(cpu) != spinning]
    return spinning, ",".join(others)


def measure(ends: tuple[End, End], path: PacketPath, setting: Setting, seconds: int) -> dict[str, float]:
    """What :func:`bench.exchange.request` measures, and :func:`bench.exchange.spin` beside it.

    The agent is stopped meanwhile: it would repair the settings.
    """
    server, client = ends
    program = shlex.join(["python3", "-c", inspect.getsource(exchange).replace("{", "{{").replace("}", "}}")])
    # Not `wait`, which may see a report that is older than the change of the settings.
    place = "trackbed apply >/dev/null"
    asked = f"{path.prefix} {program} request {server.ip} {seconds}"
    try:
        for end in ends:
            end.sh(place, timeout=300)
        if setting.spin:
            cpu, others = _cpus(client, path)
            enter = f"echo 0 > {GROUP}/cgroup.procs;" if setting.owned else ""
            asked = f"({enter} exec taskset -c {cpu} {program} spin {seconds}) & taskset -c {others} {asked} && wait $!"
            if setting.owned:
                client.sh(OWN.format(group=GROUP, cpu=cpu))
                client.sh(place, timeout=300)
        for end in ends:
            end.sh("systemctl stop trackbed", timeout=300)
            end.sh(path.make)
            end.sh((AS_FOUND if setting.name == "as found" else "") + setting.script)
            if path.prefix:
                end.sh(setting.script, prefix=path.prefix)
        server.sh(f"systemd-run --quiet --collect --unit=tuning {path.prefix} {program} answer {server.ip}")
        client.sh(
            f"until {path.prefix} {program} request {server.ip} 0.1 >/dev/null 2>&1; do sleep 0.2; done", timeout=120
        )
        lines = client.sh(asked, timeout=60 + 4 * seconds).splitlines()
    finally:
        for end in ends:
            end.sh(f"systemctl stop tuning 2>/dev/null || true; {{{{ {path.remove}; }}}} || true")
            end.sh(f"{_napi(0, 0, 0)} {DISOWN}; systemctl start trackbed", timeout=300)
    measured: dict[str, float] = {key: value for line in lines for key, value in json.loads(line).items()}
    if setting.spin:
        del measured["cpu"]  # the spinning program would count as work for the requests
    return measured


@click.command()
@options(NAME)
@click.option("--seconds", default=5, show_default=True, help="How long each measurement takes.")
@click.option(
    "--hosts",
    nargs=2,
    metavar="SERVER CLIENT",
    help="Two servers of yours instead of the lab's nodes; ssh logs in as root.",
)
@click.option("--pf", default=PF, show_default=True, help="The netdev of the PF, on both hosts.")
def main(rounds: int, seconds: int, record: bool, hosts: tuple[str, str] | None, pf: str) -> None:
    """Print the requests a second of each path with each setting, their p99 and CPU time, and a program's stops."""
    server, client = map(Server, hosts) if hosts else nodes()[:2]
    ends = End.of(server, pf, "10.99.0.1"), End.of(client, pf, "10.99.0.2")
    compare(
        NAME,
        {path.name: path for path in PATHS},
        {setting.name: setting for setting in SETTINGS},
        lambda path, setting: measure(ends, path, setting, seconds),
        rounds=rounds,
        record=record,
    )


if __name__ == "__main__":
    main()
