"""Holds of packages: apt's, and dnf's version locks.

/var/lib/trackbed/holds         the holds that the deploy has set, one a line. The removal releases only these.
/var/lib/trackbed/holds.before  while the deploy sets holds: those from before. It is left only by an interruption.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from pyinfra.api.command import StringCommand
from pyinfra.context import host

from agent.report.names import STATE_FOLDER
from tasks.common.commands import Commands, refuse, script
from tasks.common.facts import FactBase
from tasks.common.texts import PUT, Texts
from tasks.packages import WAITING_DNF, Family, dnf_install

PATH = f"{STATE_FOLDER}/holds"
BEFORE = f"{PATH}.before"

LOCK_PLUGIN = "python3-dnf-plugin-versionlock"
NO_LOCKS = (
    "dnf on this node is dnf5, and the deploy cannot set its version locks (/etc/dnf/versionlock.toml); use a release with "
    "dnf 4 (RHEL up to 10, Fedora up to 40), or hold no packages: leave out kernel.hold, or the key of the driver"
)

LOCKS = """
locks() {  # argument: the root folder
  list=$(sed -n 's/^locklist *= *//p' "$1/etc/dnf/plugins/versionlock.conf" 2>/dev/null || true)
  sed '/^#/d; /^[[:space:]]*$/d' "$1${list:-/etc/dnf/plugins/versionlock.list}" 2>/dev/null || true
}
"""
"""A shell function that prints dnf's version locks. `dnf versionlock list` would load all repositories first."""

HOLDS = (
    LOCKS
    + """
holds() {  # argument: the root folder
  if command -v apt-mark >/dev/null; then apt-mark showhold; fi
  locks "$1"
}
"""
)
"""A shell function that prints all holds."""

MARKING = (
    WAITING_DNF
    + """
marking() (  # argument: a command that sets or removes holds
  left=60
  while true; do
    code=0
    message=$("$@" 2>&1) || code=$?
    left=$((left - 1))
    case $message in *"dpkg: error: dpkg "*"locked by "*) ;; *) break ;; esac
    [ "$left" != 0 ] || break
    sleep 5
  done
  if [ -n "$message" ]; then printf '%s\\n' "$message" >&2; fi
  exit "$code"
)
"""
)
"""A shell function that waits up to five minutes for another apt, dpkg or dnf. apt-mark has dpkg write the holds. dpkg does not
wait, and names the process that has its lock."""

NOTED = (
    HOLDS
    + MARKING
    + PUT
    + """
note() {  # argument: the file
  if [ -e "$1.before" ]; then
    holds '' | grep -vxFf "$1.before" >> "$1" || true
    rm "$1.before"
  fi
}
noted() {  # arguments: the file, and the command that sets holds
  file=$1; shift
  mkdir -p "${file%/*}"
  note "$file"
  holds '' > "$file.new"
  put "$file.new" "$file.before"
  # No variable for the exit status: a function shares all variables with the script that calls it.
  if marking "$@"; then set -- 0; else set -- "$?"; fi
  note "$file"
  return "$1"
}
"""
)
"""Shell functions. ``noted`` runs a command, and notes the holds that are new after it. ``note`` finishes this after an
interruption, and otherwise does nothing."""


class HeldPackages(FactBase[dict[str, str | None]]):
    """The held packages, with the version of dnf's lock. apt's holds have no version (None): they hold the installed one."""

    default = dict

    def command(self, family: Family) -> StringCommand:
        """List apt's holds or dnf's version locks."""
        if family == "debian":
            return self.script("apt-mark showhold")
        return self.script(f"{LOCKS}locks ''")

    def process(self, output: list[str]) -> dict[str, str | None]:
        """Parse ``name``, or ``name-epoch:version-release.*``."""
        held: dict[str, str | None] = {}
        for line in output:
            locked = re.fullmatch(r"(\S+)-\d+:(\S+)\.\*", line.strip())
            held[locked[1] if locked else line.strip()] = locked[2] if locked else None
        return held


def has_dnf5(have: Mapping[str, object]) -> bool:
    """Whether dnf is dnf5, whose version locks have another form. Since Fedora 41 it replaces the package dnf (dnf5.spec)."""
    return "dnf5" in have and "dnf" not in have


def lock_plugin(have: Mapping[str, object]) -> Commands:
    """For an operation: install dnf's plugin for version locks if it is missing; refuse dnf5, which has no such plugin.

    :param have: the installed packages.
    """
    if has_dnf5(have):
        yield refuse(NO_LOCKS)
    elif LOCK_PLUGIN not in have:
        yield dnf_install(LOCK_PLUGIN)


def finish() -> Commands:
    """For an operation: note the holds of a deploy that was interrupted before it noted them.

    This cannot wait for the removal: what the operator holds until then would count as the deploy's.
    """
    if BEFORE in host.get_fact(Texts, paths=(BEFORE,)):
        yield script(f'{NOTED}note "$1"', PATH)


def hold(family: Family, *packages: str) -> StringCommand:
    """A command that holds packages, and notes that."""
    words = ("apt-mark", "hold") if family == "debian" else ("dnf", "versionlock", "add")
    return script(f'{NOTED}noted "$@"', PATH, *words, *packages)


def release(family: Family, *packages: str) -> StringCommand:
    """A command that removes the holds of packages."""
    words = ("apt-mark", "unhold") if family == "debian" else ("dnf", "versionlock", "delete")
    return script(f'{MARKING}marking "$@"', *words, *packages)
