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

from tasks.common import systemd_reload
from tasks.common.commands import Commands, script
from tasks.common.data import Key, record
from tasks.common.facts import FactBase
from tasks.common.texts import HEADER

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


LIMITS = Key[Limits | None]("limits", None, record(Limits))
KEYS = (LIMITS,)


@frozen
class LimitState:
    """The present state. ``logins``: the file for logins is as wanted.

    The others are sets of services. ``current``: with the wanted drop-in. ``old``: with a drop-in that is not wanted.
    ``limited``: systemd reports a limit. ``running``: the running process has a limit in /proc/PID/limits.
    """

    logins: bool = False
    current: frozenset[str] = frozenset()
    old: frozenset[str] = frozenset()
    limited: frozenset[str] = frozenset()
    running: frozenset[str] = frozenset()


_PROCESSES = """
# shellcheck disable=SC2046  # a process is a word
processes() { echo "$1" $(pgrep --parent "$1" --exact containerd || true); }  # a unit's process, and its own containerd
"""

# Older versions of systemd print infinity as a number.
_STATE = (
    _PROCESSES
    + """
same() { [ "$(cat "$1"; echo .)" = "$2." ]; }
root=$1 drop_in=$2 text=$3 logins=$4 logins_text=$5; shift 5
if [ -z "$logins_text" ]; then
  if [ ! -e "$logins" ]; then echo logins; fi
elif [ -e "$logins" ] && same "$logins" "$logins_text"; then echo logins
fi
for file in "$root"/etc/systemd/system/*.service.d/"$drop_in"; do
  [ -e "$file" ] || continue
  unit=${file%.service.d/*}; unit=${unit##*/}
  case " $* " in *" $unit "*) if same "$file" "$text"; then echo "current $unit"; fi ;; *) echo "old $unit" ;; esac
done
for file in "$root"/etc/systemd/system/*.service.d/"$drop_in".old; do
  unit=${file%.service.d/*}
  if [ -e "$file" ]; then echo "old ${unit##*/}"; fi
done
for unit; do
  properties=$(systemctl show --property=LoadState,LimitMEMLOCK,LimitMEMLOCKSoft,MainPID "$unit.service")
  case $properties in *LoadState=loaded*) ;; *) continue ;; esac
  unlimited=$(echo "$properties" | grep -cE '^LimitMEMLOCK(Soft)?=(infinity|18446744073709551615)$' || true)
  if [ "$unlimited" != 2 ]; then echo "limited $unit"; fi
  pid=$(echo "$properties" | sed -n 's/^MainPID=//p')
  [ "$pid" != 0 ] || continue
  for pid in $(processes "$pid"); do
    lock=$(grep '^Max locked memory ' "$root/proc/$pid/limits" 2>/dev/null || true)
    case $lock in ""|*" unlimited "*" unlimited "*) ;; *) echo "running $unit" ;; esac
  done
done
"""
)


class MemoryLimits(FactBase[LimitState]):
    """The drop-ins, the limits that systemd reports, and those of the running processes."""

    default = LimitState

    def command(self, wanted: Limits) -> StringCommand:
        """Read everything by one script."""
        return self.script(
            _STATE, "", DROP_IN, DROP_IN_TEXT, LOGINS, LOGINS_TEXT if wanted.logins else "", *wanted.daemons
        )

    def process(self, output: list[str]) -> LimitState:
        """Parse lines such as `current containerd`."""
        lines = {(*line.split(), "")[:2] for line in output}
        sets = ("current", "old", "limited", "running")
        return LimitState(
            ("logins", "") in lines, *(frozenset(name for word, name in lines if word == each) for each in sets)
        )


@deploy("Limits")
def lift() -> None:
    """Remove the limit as the inventory says; without the key, delete what an earlier deploy wrote."""
    memlock(name="Locked memory", wanted=LIMITS.here() or Limits((), logins=False))


# The rename makes a file appear complete. systemd ignores names that do not end in .conf, such as the temporary one. A removed
# file keeps such a name until systemd has read its units without it, so that the next deploy sees what was interrupted.
_LIFT = (
    _PROCESSES
    + """
put() { mkdir -p "${1%/*}"; printf %s "$2" > "$1.new"; chmod 644 "$1.new"; mv -T "$1.new" "$1"; }
root=$1 drop_in=$2 text=$3 logins=$4 logins_text=$5; shift 5
if [ -n "$logins_text" ]; then put "$logins" "$logins_text"; else rm -f "$logins"; fi
for file in "$root"/etc/systemd/system/*.service.d/"$drop_in"; do
  [ -e "$file" ] || continue
  unit=${file%.service.d/*}; unit=${unit##*/}
  case " $* " in *" $unit "*) ;; *) mv "$file" "$file.old" ;; esac
done
for unit; do put "$root/etc/systemd/system/$unit.service.d/$drop_in" "$text"; done
"""
    + systemd_reload.RELOAD
    + """
for file in "$root"/etc/systemd/system/*.service.d/"$drop_in".old; do
  rm -f "$file"
  rmdir --ignore-fail-on-non-empty "${file%/*}" 2>/dev/null || true
done
for unit; do
  properties=$(systemctl show --property=LoadState,LimitMEMLOCK,LimitMEMLOCKSoft,MainPID "$unit.service")
  case $properties in *LoadState=loaded*) ;; *) continue ;; esac
  if [ "$(echo "$properties" | grep -cE '^LimitMEMLOCK(Soft)?=(infinity|18446744073709551615)$')" != 2 ]; then
    echo "limits: $unit.service still has a limit of locked memory, since a later drop-in sets LimitMEMLOCK; remove it there" \\
      "(\\`systemctl cat $unit\\` shows which)" >&2
    exit 1
  fi
  pid=$(echo "$properties" | sed -n 's/^MainPID=//p')
  [ "$pid" != 0 ] || continue
  for pid in $(processes "$pid"); do
    # A kubelet that has not joined ends and starts every few seconds. The next process has the limit of its unit.
    prlimit --pid "$pid" --memlock=unlimited:unlimited || [ ! -e "$root/proc/$pid" ]
  done
done
"""
)


@operation()
def memlock(wanted: Limits) -> Commands:
    """Write the drop-ins and the file for logins, and remove the limit of the running daemons."""
    have = host.get_fact(MemoryLimits, wanted=wanted)
    daemons = frozenset(wanted.daemons)
    if have == LimitState(logins=True, current=daemons):
        host.noop("locked memory is unlimited" if daemons or wanted.logins else "Trackbed has set no limits")
        return
    if systemd_reload.deferred("limits of locked memory"):
        return
    yield script(_LIFT, "", DROP_IN, DROP_IN_TEXT, LOGINS, LOGINS_TEXT if wanted.logins else "", *wanted.daemons)
