"""Who uses a host in a way that a reboot would break, and that no drain ends: see docs/disruption.md."""

from __future__ import annotations

from typing import Literal

from pyinfra.api.command import StringCommand

from tasks.drivers.device_nodes import HOLDERS
from tasks.drivers.gpu_driver import modules as gpu
from tasks.drivers.ofed import users as ofed

Of = Literal["host", "node to drain", "drained node"]
"""A host in no cluster; a node whose pods a drain will end, with their storage; and one whose pods it has ended.

After a drain those of DaemonSets still run, such as a device plugin that has the GPUs open. They bear a reboot.
"""

# nv-hostengine, NVIDIA's DCGM, only watches the GPUs.
_USERS = f"""
machine=$1 of=$4
rdma_users() (
{ofed.USERS}
:
)
gpu_users() (
{gpu._USERS}
)
rdma=$(rdma_users "$1" "$2" "$3")
gpus=$(gpu_users "$1")
{HOLDERS}
vfio=$(holders "$machine" /dev/vfio/ | cut -d ' ' -f 1 | sort -u | while read -r pid; do
  read -r comm < "$machine/proc/$pid/comm" 2>/dev/null || continue
  echo "$comm ($pid) has a VFIO device open"
done)
{{
  printf '%s\\n' "$rdma"
  printf '%s\\n' "$gpus" | sed 's/)$/) has a GPU open/'
  printf '%s\\n' "$vfio"
}} | while IFS= read -r line; do
  case $line in '' | nv-hostengine*) continue ;; esac
  pid=$(printf '%s\\n' "$line" | sed -n 's/.*(\\(pid \\)\\{{0,1\\}}\\([0-9][0-9]*\\)) has .*/\\2/p')
  if [ "$of" != host ] && [ -n "$pid" ] && grep -qs kubepods "$machine/proc/$pid/cgroup"; then continue; fi
  if [ "$of" = "node to drain" ]; then
    case $line in /var/lib/kubelet/*) continue ;; *" is mounted over RDMA") ;; *) [ -n "$pid" ] || continue ;; esac
  fi
  printf '%s\\n' "$line"
done
"""


class RebootUsers(ofed.Users):
    """The users, one line each."""

    def command(self, of: Of) -> StringCommand:
        """List the users."""
        return self.script(_USERS, "", " ".join(ofed.STORAGE), " ".join(ofed.PEER_MEMORY), of)
