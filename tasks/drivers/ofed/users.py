"""Who uses RDMA in a way that a reload of the drivers would break."""

from __future__ import annotations

from pyinfra.api.command import StringCommand

from tasks.common.facts import Lines
from tasks.drivers.device_nodes import HOLDERS

STORAGE = ("ib_iser", "ib_isert", "ib_srp", "ib_srpt", "nvme_rdma", "nvmet_rdma", "rpcrdma", "xprtrdma")
PEER_MEMORY = ("nvidia_peermem", "nv_peer_mem")
AUXILIARY = "mlx5_vdpa mlx5_fwctl mlx5_dpll"
"""Drivers of mlx5_core's auxiliary devices. The kernel loads them by itself: mlx5_dpll since 6.7, mlx5_fwctl since 6.15."""

USERS = (
    HOLDERS
    + """
root=$1 storage=$2 peers=$3 auxiliary='"""
    + AUXILIARY
    + """'; shift 3
affected=" $* "
sys=$root/sys

# The number of users that are not modules: refcnt also counts modules that depend on this one.
others() {
  [ -r "$sys/module/$1/refcnt" ] || { echo 0; return; }
  read -r count < "$sys/module/$1/refcnt"
  for holder in "$sys/module/$1"/holders/*; do if [ -e "$holder" ]; then count=$((count - 1)); fi; done
  echo "$count"
}
for module in $peers; do
  if [ "$(others "$module")" -gt 0 ]; then echo "$module: $(others "$module") in use (GPU memory that is registered)"; fi
done
for module in $auxiliary; do
  if [ "$(others "$module")" -gt 0 ]; then echo "$module: $(others "$module") in use"; fi
done
for module in $storage; do
  if [ "$(others "$module")" -gt 0 ]; then echo "$module: $(others "$module") in use (storage over RDMA)"; fi
done
for file in "$sys"/class/nvme/*/transport; do
  [ -e "$file" ] || continue
  read -r transport < "$file"
  if [ "$transport" = rdma ]; then file=${file%/transport}; echo "${file##*/} is NVMe over RDMA"; fi
done
# NFS (rdma6: by IPv6), SMB Direct, 9p, and Lustre's clients and servers. BeeGFS uses RDMA by itself wherever it can.
awk '$4 ~ /(^|,)(proto=|trans=)?rdma6?(,|$)/ || ($3 == "lustre" && $1 $4 ~ /@o2ib/) || $3 ~ /^beegfs/ {
  print $2 " is mounted over RDMA" }' "$root/proc/1/mounts"

# A module that needs one of these and does not go with them: a server or a file system of the kernel, another vendor's driver.
for module; do
  for holder in "$sys/module/$module"/holders/*; do
    [ -e "$holder" ] || continue
    case "$affected$storage $peers $auxiliary " in *" ${holder##*/} "*) ;; *) echo "${holder##*/} needs $module" ;; esac
  done
done

# The kernel's own queue pairs. Those of ib_core are of its management datagrams, and ib_ipoib's are of netdevs.
rdma resource show qp 2>/dev/null | sed -n 's/^link \\([^/ ]*\\).* comm \\[\\(.*\\)\\].*/\\1 \\2/p' | sort -u |
  while read -r device owner; do
    case "$owner" in ib_core | ib_ipoib) ;; *) echo "$owner of the kernel has a queue pair of $device" ;; esac
  done

# A process that has an RDMA device open keeps its driver loaded.
holders "$root" /dev/infiniband/ | while read -r pid device; do
  read -r comm < "$root/proc/$pid/comm" 2>/dev/null || continue
  echo "$comm (pid $pid) has ${device##*/} open"
done

# Netdevs that would disappear, by the module of their driver, and what depends on them.
# Each address with an established connection to another machine, and who has it. ss prints the ends so: 10.0.0.5:22;
# [fd00::5]:22; [::ffff:10.0.0.5]:22 of an IPv6 socket; [fe80::5]%eth0:22 and 10.0.0.5%vrf0:22 of a bound one.
connected=$({ ip -o addr show; ss -Htnp state established; } 2>/dev/null | awk '
  function bare(end) { sub(/:[0-9]+$/, "", end); gsub(/[][]|%.*/, "", end); sub(/^::ffff:/, "", end); return end }
  $3 == "inet" || $3 == "inet6" { sub(/\\/.*/, "", $4); own[$4]; next }
  { here = bare($3); peer = bare($4); if (here == peer || peer in own || peer ~ /^127[.]/) next }
  { print here, match($0, /"[^"]+"/) ? substr($0, RSTART + 1, RLENGTH - 2) : "the kernel" }' | sort -u)
routed=$({ ip -o route show table all; ip -o -6 route show table all; } 2>/dev/null |
  awk '/ via / { for (i = 1; i < NF; i++) if ($i == "dev") print $(i + 1) }' | sort -u)
carries() {
  for word in $routed; do if [ "$word" = "$1" ]; then echo "a route goes through $1"; fi; done
  for address in $(ip -o addr show dev "$1" 2>/dev/null | awk '{ sub(/\\/.*/, "", $4); print $4 }'); do
    printf '%s\\n' "$connected" | while read -r here who; do
      if [ "$here" = "$address" ]; then echo "$1 carries a connection of $who ($address)"; fi
    done
  done
  for upper in "$sys/class/net/$1"/upper_*; do
    if [ -e "$upper" ]; then echo "${upper##*/upper_} is on top of $1"; carries "${upper##*/upper_}"; fi
  done
}
for netdev in "$sys"/class/net/*; do
  [ -e "$netdev/device/driver/module" ] || continue
  module=$(readlink "$netdev/device/driver/module"); module=${module##*/}
  case "$affected" in *" $module "*) carries "${netdev##*/}" ;; esac
done

# VFs in use by a container or a virtual machine.
for driver in "$sys"/bus/pci/drivers/*; do
  [ -e "$driver/module" ] || continue
  module=$(readlink "$driver/module"); module=${module##*/}
  case "$affected" in *" $module "*) ;; *) continue ;; esac
  for function in "$driver"/*:*:*.*; do
    [ -e "$function/class" ] || continue
    read -r class < "$function/class"
    case "$class" in 0x0200*) [ -e "$function/net" ] || echo "${function##*/} is in another network namespace" ;; esac
    for vf in "$function"/virtfn*; do
      case "$(readlink "$vf/driver" 2>/dev/null || true)" in
        */vfio-pci) vf=$(readlink "$vf"); echo "${vf##*/} is bound to vfio-pci" ;;
      esac
    done
  done
done
"""
)
"""A script that prints one line for each user. The last arguments are the modules that would be unloaded."""


class Users(Lines):
    """A fact that is the lines of its answer, each once: users of devices."""

    prefetched = False

    def process(self, output: list[str]) -> list[str]:
        """Name each once."""
        return list(dict.fromkeys(output))


class OfedUsers(Users):
    """The users of the given modules, one line each."""

    def command(self, modules: tuple[str, ...]) -> StringCommand:
        """List the users."""
        return self.script(USERS, "", " ".join(STORAGE), " ".join(PEER_MEMORY), *modules)
