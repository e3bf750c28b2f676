"""A reload of systemd's units that takes no container's GPUs.

At a reload systemd allows each container again what its scope lists (DeviceAllow=). NVIDIA's container toolkit before 1.18, and
later ones in the mode legacy, give a container its GPUs behind runc's back, so its scope does not list them. The container
loses them ("Failed to initialize NVML: Unknown Error"), and must be made anew. Where a scope lists them, it does so by links in
/dev/char, which NVIDIA's devices do not have by themselves; without its link systemd cannot allow a device. (Troubleshooting
page of NVIDIA's container toolkit; github.com/NVIDIA/nvidia-container-toolkit/issues/48.)

Run without a GPU, on files as systemd and the kernel show them.
"""

from __future__ import annotations

from pyinfra.context import host

from agent.report.records import Disruption
from tasks import disruption
from tasks.common.facts import Lines

LINKS = """
for node in /dev/nvidia* /dev/nvidia-caps/*; do
  [ -c "$node" ] || continue
  link=/dev/char/$((0x$(stat -c %t "$node"))):$((0x$(stat -c %T "$node")))
  [ "$link" -ef "$node" ] || ln -sfn "..${node#/dev}" "$link"
done
"""
"""A script that makes the links in /dev/char that are missing, or that lead to another device. Run it before
`systemctl disable`: systemd reads its units again then, too."""

ENABLE = f'{LINKS}systemctl enable --quiet "$1"\n'
"""A script that makes the links that are missing, and enables the unit $1."""

RELOAD = f"{LINKS}sync -f /etc\nsystemctl daemon-reload\n"
"""A script that makes the links that are missing, and has systemd read its units again.

It first flushes the units to the disk. The kernel may take half a minute for that, and a power cut before would leave them
empty. systemd takes an empty unit for a masked one, which never starts.
"""

# For a unit that is gone, as with its package, try-restart ends with an error.
RESTART = """
if [ "$(systemctl show --property=LoadState --value "$1")" != not-found ]; then systemctl try-restart "$1"; fi
"""
"""A script that restarts the unit $1 if the unit runs."""

# A scope has the name that its engine chose: docker-ID, nerdctl-ID. A container that may use all devices has the policy auto
# and no list, as the scope of a login has.
_LOSERS = r"""
gpu_losers() (
root=$1
systemctl show --property=Id,ControlGroup,DevicePolicy,DeviceAllow '*.scope' 2>/dev/null | awk '
    function scope() { if (of["Id"]) print of["Id"], of["DevicePolicy"], of["ControlGroup"] allow; split("", of); allow = "" }
    /^$/ { scope(); next }
    { name = $0; sub(/=.*/, "", name); sub(/^[^=]*=/, ""); of[name] = $0 }
    name == "DeviceAllow" { allow = allow " " $1 }
    END { scope() }' | while read -r scope policy group allow; do
  if [ "$policy" = auto ] && [ -z "$allow" ]; then continue; fi
  # The folder systemd is that of cgroup v1.
  process=$(cat "$root/sys/fs/cgroup$group/cgroup.procs" "$root/sys/fs/cgroup/systemd$group/cgroup.procs" 2>/dev/null |
    head -n 1)
  for node in "$root/proc/$process/root/dev"/nvidia[0-9]*; do
    # The container may end meanwhile.
    numbers=$(stat -L -c '0x%t 0x%T' "$node" 2>/dev/null) && [ -c "$node" ] || continue
    number=$((${numbers% *})):$((${numbers#* }))
    case " $allow " in
    *" char-nvidia"* | *' char-* '* | *" /dev/${node##*/} "* | *" /dev/char/$number "*) ;;
    *) echo "$scope"; break ;;
    esac
  done
done
)
"""

_CAUSE = (
    "a toolkit before 1.18 or in the mode legacy has started them; drain the node, or start them anew with a newer "
    "toolkit, and deploy again"
)
BEFORE_PACKAGES = f"""
{_LOSERS}
losers=$(gpu_losers "${{MACHINE:-}}" | tr '\\n' ' ')
if [ -n "$losers" ]; then
  echo "nothing is installed: a package may have systemd read its units again, which would take the GPUs of running" \\
    "containers (${{losers% }}): {_CAUSE}" >&2
  exit 1
fi
{LINKS}"""
"""The start of a script in which packages are installed. It ends the script if a reload by a package would take GPUs.

MACHINE: the root folder; only tests set it.
"""


class GpuLosers(Lines):
    """The scopes of running containers that would lose their GPUs at a reload, although it makes the links."""

    prefetched = False
    shell = f"{_LOSERS}gpu_losers ''\n"


def would_take_gpus() -> str:
    """For an operation: why systemd must not reload its units now; empty if it may."""
    scopes = host.get_fact(GpuLosers)
    if not scopes:
        return ""
    names = ", ".join(scopes[:4]) + (f" and {len(scopes) - 4} more" if len(scopes) > 4 else "")
    return f"a reload of systemd's units would take the GPUs of running containers ({names}): {_CAUSE}"


def deferred(step: str) -> bool:
    """For an operation whose change needs a reload: whether it must wait. Then it is named, with the reason."""
    return disruption.deferred(step, Disruption.NONE, of_nics=False, hindrance=would_take_gpus)
