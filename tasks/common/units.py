"""Units of systemd: their state, and an operation that enables and starts them."""

from __future__ import annotations

from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks.common import systemd_reload
from tasks.common.commands import Commands, refuse, script
from tasks.common.facts import Lines
from tasks.common.texts import READ, Printed

FOLDER = "/etc/systemd/system"
"""The folder of units and drop-ins that are no package's."""

STALE = """
stale() {  # arguments: a unit, the property with the time of its start, and a file; if none is given, the unit's own
  file=${3-$(systemctl show --property=FragmentPath --value "$1")}
  started=$(TZ=UTC systemctl show --property="$2" --value "$1")
  [ -e "$file" ] && [ -n "$started" ] || return 0
  written=$(stat -L -c %Y "$file") now=$(date +%s) started=$(date -d "$started" +%s)
  since_boot=$(systemctl show --property="$2Monotonic" --value "$1")
  read -r uptime _ < /proc/uptime
  corrected=$((now - ${uptime%%.*} + ${since_boot:-0} / 1000000 - 1))
  if [ -n "$since_boot" ] && [ "$corrected" -gt "$started" ]; then started=$corrected; fi
  if [ "$written" -gt "$started" ] && [ "$written" -le "$now" ]; then echo NeedDaemonReload=yes; fi
}
"""
"""A shell function. It prints systemd's line NeedDaemonReload=yes if the file is newer than the unit's start.

systemd's own line does not suffice: any daemon-reload clears it, also if the restart that should follow was lost with the
connection. The time is in UTC, since abbreviations of other time zones are ambiguous. systemd keeps the time that the clock
showed at the start, which may be years too early if the clock was set later in the boot. So the time since the boot counts, too
(a second less, since it is rounded). A file from the future, as after the clock was set back, does not count: it would be newer
than any restart.
"""

_STATES = """
for unit; do systemctl show --property=LoadState,UnitFileState,ActiveState,Type,Result "$unit" | sort | tr '\\n' ' '; echo; done
"""


class UnitStates(Lines):
    """The state of units, one line for each: `ActiveState=active LoadState=loaded Result=success ...`."""

    def command(self, units: tuple[str, ...]) -> StringCommand:
        """Print systemd's properties of each unit."""
        return self.script(_STATES, *units)


_DROP_INS = f"""
name=$2
for folder in "$1"/*.d; do set -- "$@" "$folder/$name"; done
shift 2
{READ}"""


class DropIns(Printed):
    """The drop-ins of a name in the folders of all units, by path. ``others``: more files, for which no fact is needed then."""

    def command(self, file: str, others: tuple[str, ...] = ()) -> StringCommand:
        """Look for the name in each folder."""
        return self.script(_DROP_INS, FOLDER, file, *others)


def is_missing(state: str) -> bool:
    """Whether systemd knows no such unit."""
    return "LoadState=not-found" in state


def is_enabled(state: str) -> bool:
    """Whether the unit starts at boot."""
    return "UnitFileState=enabled" in state.split()


def is_static(state: str) -> bool:
    """Whether the unit cannot be enabled: something else starts it, such as a udev rule."""
    return "UnitFileState=static" in state.split()


def is_active(state: str) -> bool:
    """Whether the unit runs. A path or timer unit runs while it waits."""
    return "ActiveState=active" in state


# systemctl ends with 0 if ExecCondition= had the unit skipped.
_START = """
unit=$1 remedy=$2
if ! systemctl start "$unit" || [ "$(systemctl show --property=Result --value "$unit")" = exec-condition ]; then
  { journalctl --unit="$unit" --lines=10 --output=cat --no-pager; echo "$remedy"; exit 1; } >&2
fi
"""


def enable(unit: str, missing: str, failed: str) -> Commands:
    """For an operation: start a unit now and at every boot.

    :param missing: the error if there is no such unit.
    :param failed: the remedy, printed after the unit's journal if it does not start.
    """
    [state] = host.get_fact(UnitStates, units=(unit,)) or [""]
    # One that ends by itself, as a oneshot does, has run when it was enabled, and at the boot; unless it failed or was skipped.
    runs = is_active(state) or ("Type=oneshot" in state and is_enabled(state) and "Result=success" in state)
    if is_missing(state) and host.state.is_executing:
        yield refuse(missing)
    elif (is_enabled(state) or is_static(state)) and runs:
        host.noop(f"{unit} runs, now and at every boot")
    elif not is_enabled(state) and systemd_reload.deferred(f"{unit} at every boot"):
        # systemctl has systemd read its units again when it enables one.
        if not runs:
            yield script(_START, unit, failed)
    else:
        yield script(systemd_reload.ENABLE + _START, unit, failed)


@operation()
def enabled(unit: str, missing: str, failed: str) -> Commands:
    """Start a unit now and at every boot, as :func:`enable` does."""
    yield from enable(unit, missing, failed)
