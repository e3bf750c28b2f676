"""A VF in another network namespace, as a pod has it: the agent still keeps its interrupts and its steering."""

from lab import MACHINES, Node
from tests.lab.conftest import eventually, settled

PF = MACHINES[0].nics[0]
VF = f"{PF.netdev}v1"
RPS = "ip netns exec pod cat /sys/class/net/net1/queues/rx-0/rps_cpus"
MOUNTS = "cat /proc/$(pgrep -f '[t]rackbed.* worker --activity')/mountinfo"


def test_a_pod_s_vf_is_steered_on_its_own_events_and_nothing_is_left_behind(node: Node) -> None:
    mounts = len(node.sh(MOUNTS).splitlines())
    node.sh(
        f"ip netns add pod; ip link set {VF} netns pod; ip -n pod link set {VF} name net1; ip -n pod link set net1 up"
    )
    # The namespace itself is mounted at /run/netns.
    mounts += len(
        [line for line in node.sh(MOUNTS).splitlines() if " net:[" in line or line.split()[4] == "/run/netns"]
    )
    eventually("RPS", lambda: int(node.sh(RPS), 16) != 0)
    node.sh("ip netns exec pod sh -c 'echo 0 > /sys/class/net/net1/queues/rx-0/rps_cpus'")
    node.sh("ip -n pod link set net1 mtu 1400")
    eventually("RPS on the event of the VF", lambda: int(node.sh(RPS), 16) != 0, within=45)
    assert len(node.sh(MOUNTS).splitlines()) == mounts
    node.sh("ip netns del pod")
    eventually("the VF", lambda: node.sh(f"ls /sys/bus/pci/devices/{PF.vf_pcis[1]}/net").strip() != "")
    settled(node)
