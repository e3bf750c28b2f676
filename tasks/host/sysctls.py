"""Loads the sysctls that must be set at boot, before the agent runs or without it, and reads them back."""

from __future__ import annotations

from collections.abc import Mapping

from pyinfra.api.command import StringCommand
from pyinfra.api.operation import OperationMeta, operation
from pyinfra.context import host

from agent.spec.sysctl_names import meaning, path
from tasks.common.commands import Commands, changes, refuse, script, warn
from tasks.common.facts import FactBase

PATH = "/etc/sysctl.d/90-trackbed.conf"

_VALUES = 'for path; do if [ -r "$path" ]; then echo "$path $(cat "$path")"; fi; done'


class SysctlValues(FactBase[dict[str, str]]):
    """The values of sysctls, by path."""

    default = dict

    def command(self, paths: tuple[str, ...]) -> StringCommand:
        """Read the files."""
        return script(_VALUES, *paths)

    def process(self, output: list[str]) -> dict[str, str]:
        """Parse lines of path and value; runs of white space become one space."""
        return {path: " ".join(value.split()) for path, _, value in (line.partition(" ") for line in output)}


_LOAD = """
for program in /usr/lib/systemd/systemd-sysctl /lib/systemd/systemd-sysctl; do
  if [ -x "$program" ]; then exec "$program" "$1"; fi
done
exec sysctl --load="$1"
"""


@operation()
def load(wanted: Mapping[str, str], settings: OperationMeta) -> Commands:
    """Load the file as a boot does, if it has changed or a value differs. Then read the values back.

    A parameter that the kernel does not have, as of a module that is not loaded, is only a warning: systemd-sysctl ignores it.
    """
    have = _values(wanted) if wanted else {}
    if wanted and (changes(settings) or _others(wanted, have)):
        yield script(_LOAD, PATH)
        have = _values(wanted) if host.state.is_executing else have
    else:
        host.noop("the sysctls have these values")
    if not wanted or not host.state.is_executing:
        return
    if missing := sorted(name for name in wanted if path(name) not in have):
        warn(
            host,
            f"boot.sysctls: the kernel does not have {', '.join(missing)}; load the module that brings it (kernel_modules), or "
            "remove it there",
        )
    if others := _others(wanted, have):
        listed = ", ".join(f"{name} is {value}, not {wanted[name]}" for name, value in sorted(others.items()))
        yield refuse(f"boot.sysctls: after {PATH} was loaded, {listed}: the kernel does not take the value; correct it")


def _values(wanted: Mapping[str, str]) -> dict[str, str]:
    values: dict[str, str] = host.get_fact(SysctlValues, paths=tuple(path(name) for name in wanted))
    return values


def _others(wanted: Mapping[str, str], have: Mapping[str, str]) -> dict[str, str]:
    """The sysctls that have another value than the wanted one, in whatever notation, with that value.

    :param have: the values by path.
    """
    return {
        name: have[path(name)]
        for name, value in wanted.items()
        if path(name) in have and meaning(name, have[path(name)]) != meaning(name, value)
    }
