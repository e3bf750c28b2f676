"""Removes the limit of locked memory for daemons and logins, since RDMA locks the memory that it registers.

A container inherits the limit of the process that started it (setrlimit(2)), so the daemons that start containers get a systemd
drop-in. Running daemons get the new limit at once by prlimit(1), without a restart; their running children keep the old limit.
Logins get it from pam_limits (limits.conf(5)) at the next login.
"""

from __future__ import annotations

import re

from attrs import Attribute, field, frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks.common import systemd_reload, units
from tasks.common.commands import Commands, refuse, script
from tasks.common.data import Key, record
from tasks.common.facts import Lines
from tasks.common.texts import HEADER, replace

DROP_IN = "trackbed-limits.conf"
DROP_IN_TEXT = f"{HEADER}[Service]\nLimitMEMLOCK=infinity\n"
LOGINS = "/etc/security/limits.d/90-trackbed.conf"
# `*` does not include root.
LOGINS_TEXT = HEADER + "".join(
    f"{who} {kind} memlock unlimited\n" for who in ("*", "root") for kind in ("soft", "hard")
)

# With k3s and RKE2 containers have the limit of their unit, whose process starts containerd.
DAEMONS = ("containerd", "docker", "crio", "kubelet", "k3s", "k3s-agent", "rke2-server", "rke2-agent")

_UNIT = re.compile(r"[A-Za-z0-9:_.@-]+")


def _services(_: Limits, attribute: Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
    for name in value:
        if not _UNIT.fullmatch(name) or name.endswith(".service"):
            raise ValueError(
                f"{name!r} in {attribute.name} is not a service's name; give it without '.service', as 'containerd'"
            )
        if name.endswith("@"):
            # systemd knows no limits of a template, only those of its instances.
            raise ValueError(f"{name!r} in {attribute.name} is a template; give its instances, as '{name}1000'")


@frozen
class Limits:
    """Which daemons get unlimited locked memory, and whether logins do.

    ``daemons``: names of systemd services. The drop-in is also written for services that are not installed yet.
    """

    daemons: tuple[str, ...] = field(default=DAEMONS, validator=_services)
    logins: bool = True


NONE = Limits((), logins=False)
LIMITS = Key[Limits | None]("limits", None, record(Limits))


# Older versions of systemd print infinity as a number.
_UNIT_STATE = """
properties_of() { systemctl show --property=LoadState,LimitMEMLOCK,LimitMEMLOCKSoft,MainPID "$1.service"; }
is_loaded() { case $properties in *LoadState=loaded*) ;; *) return 1 ;; esac }
is_unlimited() { [ "$(echo "$properties" | grep -cE '^LimitMEMLOCK(Soft)?=(infinity|18446744073709551615)$')" = 2 ]; }
processes() {  # the unit's process, and its own containerd
  pid=$(echo "$properties" | sed -n 's/^MainPID=//p')
  if [ "$pid" != 0 ]; then echo "$pid"; pgrep --parent "$pid" --exact containerd || true; fi
}
"""

_LIMITED = (
    _UNIT_STATE
    + """
root=$1; shift
for unit; do
  properties=$(properties_of "$unit")
  is_loaded || continue
  is_unlimited || echo "limited $unit"
  for pid in $(processes); do
    lock=$(grep '^Max locked memory ' "$root/proc/$pid/limits" 2>/dev/null || true)
    case $lock in ""|*" unlimited "*" unlimited "*) ;; *) echo "running $unit" ;; esac
  done
done
"""
)


class LimitedDaemons(Lines):
    """The daemons with a limit: `limited NAME` if systemd reports one, `running NAME` if a process has one."""

    def command(self, daemons: tuple[str, ...]) -> StringCommand:
        """Ask systemd, and read /proc/PID/limits."""
        return self.script(_LIMITED, "", *daemons)


# pam_limits reads the files in this order, and of two lines for the same domain the last counts (limits.conf(5)). The engines
# give their containers what these files say, and otherwise the limit of their own process.
_OTHERS = r"""
root=$1 ours=$2 logins=$3 daemons=$4
for file in "$root"/etc/security/limits.d/*.conf; do
  [ -f "$file" ] && [ "$logins" = yes ] || continue
  [ "$(printf '%s\n' "${file##*/}" "$ours" | sort | tail -n 1)" != "$ours" ] || continue
  awk -v file="${file#"$root"}" '($1 == "*" || $1 == "root") && $3 == "memlock" && $4 !~ /^(unlimited|infinity|-1)$/ {
    print file " is read after the deploy'"'"'s own file, and has `" $1, $2, $3, $4 "`" }' "$file"
done
[ "$daemons" = yes ] || exit 0
contains() { echo "${1#"$root"} gives containers a limit of locked memory"; }
file=$root/etc/docker/daemon.json
limited='."default-ulimits".memlock | objects | select(.Hard != -1 or .Soft != -1) | "limited"'
if [ "$(jq -r "$limited" "$file" 2>/dev/null)" = limited ]; then contains "$file"; fi
for file in "$root"/etc/crio/crio.conf "$root"/etc/crio/crio.conf.d/*; do
  if grep -oE '^[^#]*"memlock=[^"]*' "$file" 2>/dev/null | grep -qvE '=(-1|unlimited)(:(-1|unlimited))?$'; then
    contains "$file"
  fi
done
cat "$root"/etc/containerd/*.toml "$root"/etc/containerd/*/*.toml \
  "$root"/var/lib/rancher/*/agent/etc/containerd/*.toml 2>/dev/null |
  sed -n 's/^[^#]*base_runtime_spec *= *["'\'']\([^"'\'']*\).*/\1/p' | sort -u | while read -r file; do
  limited='.process.rlimits[]? | select(.type == "RLIMIT_MEMLOCK" and (.hard < 1e18 or .soft < 1e18)) | "limited"'
  if [ "$(jq -r "$limited" "$root$file" 2>/dev/null)" = limited ]; then contains "$root$file"; fi
done
"""


class OtherLimits(Lines):
    """What limits locked memory all the same: files that pam_limits reads later, and settings of container engines."""

    def command(self, logins: bool, daemons: bool) -> StringCommand:
        """Read the files."""
        asked = ("yes" if each else "no" for each in (logins, daemons))
        return self.script(_OTHERS, "", LOGINS.rpartition("/")[2], *asked)


@deploy("Limits")
def lift() -> None:
    """Remove the limit as the inventory says; without the key, delete what an earlier deploy wrote."""
    memlock(name="Locked memory", wanted=LIMITS.here() or NONE)


_LIFT = (
    f"{systemd_reload.RELOAD}{_UNIT_STATE}"
    + """
root=$1; shift
for unit; do
  properties=$(properties_of "$unit")
  is_loaded || continue
  if ! is_unlimited; then
    echo "limits: $unit.service still has a limit of locked memory, since a later drop-in sets LimitMEMLOCK; remove it there" \\
      "(\\`systemctl cat $unit\\` shows which)" >&2
    exit 1
  fi
  for pid in $(processes); do
    # A kubelet that has not joined ends and starts every few seconds. The next process has the limit of its unit.
    prlimit --pid "$pid" --memlock=unlimited:unlimited || [ ! -e "$root/proc/$pid" ]
  done
done
"""
)


@operation()
def memlock(wanted: Limits) -> Commands:
    """Write the drop-ins and the file for logins, and remove the limit of the running daemons. Refuse what undoes this."""
    yield from _lift(wanted)
    others = host.get_fact(OtherLimits, logins=wanted.logins, daemons=bool(wanted.daemons)) if wanted != NONE else []
    if others:
        yield refuse("\n".join(f"limits: {each}; remove it there" for each in others))


def _lift(wanted: Limits) -> Commands:
    want = {f"{units.FOLDER}/{daemon}.service.d/{DROP_IN}": DROP_IN_TEXT for daemon in wanted.daemons}
    if wanted.logins:
        want[LOGINS] = LOGINS_TEXT
    have = host.get_fact(units.DropIns, file=DROP_IN, others=(LOGINS,))
    limited = host.get_fact(LimitedDaemons, daemons=wanted.daemons) if wanted.daemons else []
    if have == want and not limited:
        host.noop("locked memory is unlimited" if want else "Trackbed has set no limits")
        return
    if systemd_reload.deferred("limits of locked memory"):
        return
    if have == want:
        yield script(_LIFT, "", *wanted.daemons)
    yield from replace(have, want, _LIFT, "", *wanted.daemons)
    if gone := sorted(path.removesuffix(f"/{DROP_IN}") for path in {*have} - {*want, LOGINS}):
        yield script('rmdir --ignore-fail-on-non-empty "$@"', *gone)
