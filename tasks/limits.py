"""Locked memory without a limit, for daemons and for logins: RDMA pins the memory that it registers.

A container has the limit of the process that started it: containerd's shim has containerd's (setrlimit(2)).
So the daemons that start containers get it by a drop-in of systemd's, and those that run get it at once by prlimit(1), with no
restart; what is already running below them keeps the limit that it was started with. Logins get it from pam_limits
(limits.conf(5)), at the next login.
"""

from __future__ import annotations

import re

from attrs import Attribute, field, frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks.common.commands import Commands, script
from tasks.common.data import Key, record
from tasks.kernel_modules import HEADER

DROP_IN = "trackbed-limits.conf"
DROP_IN_TEXT = f"{HEADER}[Service]\nLimitMEMLOCK=infinity\n"
LOGINS = "/etc/security/limits.d/90-trackbed.conf"
# `*` leaves root out.
LOGINS_TEXT = HEADER + "".join(
    f"{who} {kind} memlock unlimited\n" for who in ("*", "root") for kind in ("soft", "hard")
)

_UNIT = re.compile(r"[A-Za-z0-9:_.@-]+")


def _services(_: Limits, attribute: Attribute[tuple[str, ...]], value: tuple[str, ...]) -> None:
    for name in value:
        if not _UNIT.fullmatch(name) or name.endswith(".service"):
            raise ValueError(
                f"{name!r} in {attribute.name} is no service; give its name without '.service', as 'containerd'"
            )


@frozen
class Limits:
    """Whose limit of locked memory is lifted.

    ``daemons``: names of systemd services; one that is not there (yet) finds its drop-in when it is installed.
    """

    daemons: tuple[str, ...] = field(default=("containerd", "docker", "crio", "kubelet"), validator=_services)
    logins: bool = True


LIMITS = Key[Limits | None]("limits", None, record(Limits))
KEYS = (LIMITS,)


@frozen
class Found:
    """What is there. ``logins``: the file for logins is as wanted; ``current``: the services whose drop-in has our text.

    ``old`` are the services with a drop-in that is not wanted, ``limited`` those that have a limit by systemd's word, and
    ``running`` those whose process has one, by /proc/PID/limits.
    """

    logins: bool = False
    current: frozenset[str] = frozenset()
    old: frozenset[str] = frozenset()
    limited: frozenset[str] = frozenset()
    running: frozenset[str] = frozenset()


# Older versions of systemd write infinity as a number.
_FIND = """
same() { [ "$(cat "$1"; echo .)" = "$2." ]; }
drop_in=$1 text=$2 logins=$3 logins_text=$4; shift 4
if [ -z "$logins_text" ]; then
  if [ ! -e "$logins" ]; then echo logins; fi
elif [ -e "$logins" ] && same "$logins" "$logins_text"; then echo logins
fi
for file in /etc/systemd/system/*.service.d/"$drop_in"; do
  [ -e "$file" ] || continue
  unit=${file%.service.d/*}; unit=${unit##*/}
  case " $* " in *" $unit "*) if same "$file" "$text"; then echo "current $unit"; fi ;; *) echo "old $unit" ;; esac
done
for unit; do
  told=$(systemctl show --property=LoadState,LimitMEMLOCK,LimitMEMLOCKSoft,MainPID "$unit.service")
  case $told in *LoadState=loaded*) ;; *) continue ;; esac
  free=$(echo "$told" | grep -cE '^LimitMEMLOCK(Soft)?=(infinity|18446744073709551615)$' || true)
  if [ "$free" != 2 ]; then echo "limited $unit"; fi
  pid=$(echo "$told" | sed -n 's/^MainPID=//p')
  [ "$pid" != 0 ] || continue
  lock=$(sed -n 's/^Max locked memory *\\([a-z0-9]*\\) *\\([a-z0-9]*\\) .*/\\1 \\2/p' "/proc/$pid/limits" 2>/dev/null || true)
  case $lock in ""|"unlimited unlimited") ;; *) echo "running $unit" ;; esac
done
"""


class MemoryLimits(FactBase[Found]):
    """The drop-ins, what systemd makes of them, and the limits of the processes that run."""

    default = Found

    def command(self, wanted: Limits) -> StringCommand:
        """One script for all of it."""
        return script(_FIND, DROP_IN, DROP_IN_TEXT, LOGINS, LOGINS_TEXT if wanted.logins else "", *wanted.daemons)

    def process(self, output: list[str]) -> Found:
        """Lines such as `current containerd`."""
        said = {(*line.split(), "")[:2] for line in output}
        named = ("current", "old", "limited", "running")
        return Found(
            ("logins", "") in said, *(frozenset(name for what, name in said if what == kind) for kind in named)
        )


@deploy("Limits")
def lift() -> None:
    """Lift the limit as the inventory says; without the key, take back what an earlier deploy wrote."""
    memlock(name="Locked memory", wanted=LIMITS.here() or Limits((), logins=False))


# A file appears complete; systemd reads none that ends otherwise than .conf.
_LIFT = """
put() { mkdir -p "${1%/*}"; printf %s "$2" > "$1.new"; chmod 644 "$1.new"; mv -T "$1.new" "$1"; }
drop_in=$1 text=$2 logins=$3 logins_text=$4; shift 4
if [ -n "$logins_text" ]; then put "$logins" "$logins_text"; else rm -f "$logins"; fi
for file in /etc/systemd/system/*.service.d/"$drop_in"; do
  unit=${file%.service.d/*}; unit=${unit##*/}
  case " $* " in *" $unit "*) ;; *) rm -f "$file"; rmdir --ignore-fail-on-non-empty "${file%/*}" 2>/dev/null || true ;; esac
done
for unit; do put "/etc/systemd/system/$unit.service.d/$drop_in" "$text"; done
systemctl daemon-reload
for unit; do
  told=$(systemctl show --property=LoadState,LimitMEMLOCK,LimitMEMLOCKSoft,MainPID "$unit.service")
  case $told in *LoadState=loaded*) ;; *) continue ;; esac
  if [ "$(echo "$told" | grep -cE '^LimitMEMLOCK(Soft)?=(infinity|18446744073709551615)$')" != 2 ]; then
    echo "limits: $unit.service has a limit of locked memory all the same: another drop-in sets LimitMEMLOCK after ours;" \\
      "\\`systemctl cat $unit\\` shows which: take it away there" >&2
    exit 1
  fi
  pid=$(echo "$told" | sed -n 's/^MainPID=//p')
  [ "$pid" = 0 ] || prlimit --pid "$pid" --memlock=unlimited:unlimited
done
"""


@operation()
def memlock(wanted: Limits) -> Commands:
    """Write the drop-ins and the file for logins, and lift the limit of the daemons that run."""
    have = host.get_fact(MemoryLimits, wanted=wanted)
    wished = frozenset(wanted.daemons)
    if have == Found(logins=True, current=wished):
        host.noop("no limit of locked memory" if wished or wanted.logins else "no limits of ours")
        return
    yield script(_LIFT, DROP_IN, DROP_IN_TEXT, LOGINS, LOGINS_TEXT if wanted.logins else "", *wanted.daemons)
