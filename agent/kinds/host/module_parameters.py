"""Parameters of loaded kernel modules: the value in /sys/module, not the file in /etc/modprobe.d.

A parameter whose file has no write bit is read only when the module is loaded, so such a change waits for a reload or a
reboot.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Collection, Mapping

from attrs import frozen

from agent.hardware.sysfs import names_in
from agent.kinds import Reading
from agent.machine import Machine
from agent.report.records import HOST, Change, Disruption
from agent.state.scope import Scope, host_in_scope
from agent.state.snapshot import Snapshot
from agent.state.wanted import Wanted

NAME = "module_parameters"


@frozen
class Parameter:
    """One parameter of a loaded module; ``missing`` says why there is none."""

    value: str = ""
    writable: bool = False
    missing: str = ""


_OCTAL = re.compile("0[0-7]+")

# What kstrtobool() of lib/kstrtox.c reads; it looks at the first letter, or at the first two of "on" and "off".
_BOOLS = {
    **dict.fromkeys(("y", "yes", "t", "true", "on", "1"), "Y"),
    **dict.fromkeys(("n", "no", "f", "false", "off", "0"), "N"),
}


def _path(module: str) -> str:
    return f"/sys/module/{module}/parameters"


def _file(field: str) -> str:
    module, _, name = field.partition(".")
    return f"{_path(module)}/{name}"


def observe(machine: Machine, want: Wanted, scope: Scope) -> Mapping[str, Mapping[str, Parameter]]:
    """The wanted parameters, as ``module.parameter``."""
    if not host_in_scope(scope):
        return {}
    return {
        HOST: {
            f"{module}.{name}": _read(machine, module, name)
            for module, parameters in want.spec.module_parameters.items()
            for name in parameters
        }
    }


def _read(machine: Machine, module: str, name: str) -> Parameter:
    files = machine.files
    path = _file(f"{module}.{name}")
    try:
        return Parameter(files.read(path), files.writable(path))
    except FileNotFoundError:
        if module not in names_in(files, "/sys/module"):
            return Parameter(missing=f"the module {module} is not loaded")
        shown = ", ".join(names_in(files, _path(module)))
        return Parameter(missing=f"{module} shows no parameter {name} (it has {shown or 'none'})")
    except PermissionError:
        return Parameter(missing=f"parameter {name} of {module} cannot be read (its file has no read permission)")
    except OSError as error:
        return Parameter(missing=f"parameter {name} of {module} cannot be read: {error}")


def _same(one: str, other: str) -> bool:
    """Whether two texts mean the same value: Y and 1, 0x10 and 16."""
    if {one, other} & {"Y", "N"}:
        # The kernel shows a bool as Y or N.
        one, other = (_BOOLS.get(text.lower(), text) for text in (one, other))
    return _number(one) == _number(other)


def _number(text: str) -> int | str:
    try:
        # As kstrtoint() reads it: in base 0, where a leading zero makes a number octal.
        return int(text, 8 if _OCTAL.fullmatch(text) else 0)
    except ValueError:
        return text


def plan(want: Wanted, have: Snapshot) -> list[Change]:
    """The parameters whose value differs."""
    changes = []
    parameters_now: Mapping[str, Parameter] = have[NAME].get(HOST, {})
    for module, parameters in sorted(want.spec.module_parameters.items()):
        for name, after in sorted(parameters.items()):
            field = f"{module}.{name}"
            now = parameters_now.get(field, Parameter(missing="it has not been read"))
            if now.missing:
                remedy = f"load it (kernel_modules), see modinfo {module}, or take {field} out of the spec"
                changes.append(Change(NAME, HOST, field, None, after, blocker=now.missing, remedy=remedy))
            elif not _same(now.value, after):
                disruption = Disruption.NONE if now.writable else Disruption.REBOOT
                remedy = (
                    f"see which values it accepts: modinfo {module}"
                    if now.writable
                    else f"it is read only when the module is loaded: write "
                    f"`options {module} {name}={after}` to /etc/modprobe.d "
                    f"(kernel_module_options), then reload {module} or reboot"
                )
                changes.append(Change(NAME, HOST, field, now.value, after, disruption, remedy=remedy))
    return changes


def reading(machine: Machine, want: Wanted, have: Snapshot, kept: Change) -> Reading | None:
    """A parameter of a loaded module as it is now."""
    module, _, name = kept.field.partition(".")
    now = _read(machine, module, name)
    if now.missing or name in want.spec.module_parameters.get(module, ()):
        return None
    # The kernel shows Y where 1 was written.
    return Reading(kept.after if _same(now.value, str(kept.after)) else now.value)


def originals_of(machine: Machine, change: Change, known: Collection[tuple[str, str, str]]) -> list[Change]:
    """Nothing if the file is read-only: then the change writes nothing that could be restored."""
    return [change] if machine.files.writable(_file(change.field)) else []


def apply(machine: Machine, change: Change) -> None:
    """Write one parameter of a loaded module."""
    try:
        machine.files.write(_file(change.field), str(change.after))
    except PermissionError as error:
        raise OSError(errno.EOPNOTSUPP, "the module reads it only when it is loaded") from error
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise OSError(errno.EINVAL, f"the module does not accept the value {change.after!r}") from error
        raise
