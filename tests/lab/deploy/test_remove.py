"""A node's state after deploys/remove.py equals its state before the first deploy."""

import pytest

from lab import MACHINES, Node
from tests.lab.conftest import FRESH, changed, pyinfra, succeeded, wait_ready

pytestmark = pytest.mark.campaign

PFS = [nic.netdev for nic in MACHINES[0].nics]

# Packages stay. So do the PF's channels and their interrupts' CPUs: its driver chooses channels when its VFs are removed.
# D-Bus starts timedated for each question about the clock; it ends by itself.
# While it has VFs, igb sets tx-usecs along with rx-usecs, and does not show it (igb_set_coalesce, IGB_FLAG_QUEUE_PAIRS).
FOOTPRINT = r"""
find /etc /opt /usr/local /root /boot -xdev ! -path /etc/ld.so.cache ! -path '/root/.*' -printf '%p %y %m %U:%G %l\n' | sort
find /etc /opt /usr/local /boot -xdev -type f ! -path /etc/ld.so.cache -exec sha256sum {} + | sort -k2
ls -d /run/trackbed* /var/lib/trackbed* /sys/fs/cgroup/system.slice/trackbed* 2>/dev/null || true
systemctl list-units --type=service --state=active,failed --no-legend --plain --no-pager |
  awk '$1 !~ /@|session|user|timedated/ {print $1, $3}'
apt-mark showhold
for pf in "$@"; do
  cd "/sys/class/net/$pf"
  for file in mtu flags tx_queue_len device/sriov_numvfs device/sriov_drivers_autoprobe queues/[rt]x-0/[rx]ps_*; do
    echo "$pf $file $(cat "$file")"
  done
  ethtool --show-coalesce "$pf" | grep -v '^tx-usecs:' | sed "s/^/$pf /"
done
cat /proc/sys/net/core/rps_sock_flow_entries
"""


def footprint(node: Node) -> list[str]:
    return node.run(["sh", "-ec", FOOTPRINT, "sh", *PFS], timeout=120, check=True).stdout.splitlines()


def test_a_node_is_given_back_as_it_was(node: Node) -> None:
    node.restore(FRESH)
    before = footprint(node)
    assert not any("trackbed" in line for line in before)
    node.restore("deployed")
    wait_ready(node)
    assert any("trackbed" in line for line in footprint(node))
    succeeded(pyinfra("-y", "--limit", "node1", "inventories/lab.py", "deploys/remove.py"))
    after = footprint(node)
    assert [line for line in after if line not in before] == []
    assert [line for line in before if line not in after] == []
    again = pyinfra("-y", "--json", "--limit", "node1", "inventories/lab.py", "deploys/remove.py")
    assert changed(again) == []


def test_a_node_whose_vf_is_in_use_is_not_given_back(node: Node) -> None:
    node.sh(f"ip netns add pod; ip link set {PFS[0]}v3 netns pod")
    # The second time the agent has the removal's spec already.
    for _ in range(2):
        refused = pyinfra(
            "-y", "--limit", "node1", "inventories/lab.py", "deploys/remove.py", "--data", "ready_timeout=60"
        )
        text = refused.stdout + refused.stderr
        assert refused.returncode != 0, text
        assert "vfs count  7 -> 0  [vf-reset]  disturbs another network namespace (0000:21:00.0#3)" in text, text
        assert "not restored after 60 s" in text, text
        assert "Agent and state" not in text, text
    assert node.sh(f"cat /sys/class/net/{PFS[0]}/device/sriov_numvfs").strip() == "7"
