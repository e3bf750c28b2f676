"""Kernel modules to have now and at every boot, and their options."""

from __future__ import annotations

import re
from io import StringIO

from pyinfra.api.command import QuoteString, StringCommand
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host
from pyinfra.operations import files

from tasks import kernel
from tasks.common.commands import Commands, script
from tasks.common.data import Key

AT_BOOT = "/etc/modules-load.d/trackbed.conf"
OPTIONS = "/etc/modprobe.d/trackbed.conf"
HEADER = "# Written by Trackbed; changes here are overwritten.\n"

NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")
VALUE = re.compile(r"[!-~]+")

Options = dict[str, dict[str, str]]


def _modules(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{value!r} is not a list; give module names, such as ['ib_umad', 'rdma_ucm']")
    for name in value:
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise ValueError(f"{name!r} is no module name; give it as lsmod prints it")
    return tuple(value)


def _options(value: object) -> Options:
    if not isinstance(value, dict) or not all(isinstance(given, dict) for given in value.values()):
        raise ValueError(f"{value!r} is not valid; give {{'module': {{'parameter': 'value'}}}}")
    made: Options = {}
    for module, parameters in value.items():
        _modules([module, *parameters])
        made[module] = {parameter: _parameter(parameter, given) for parameter, given in parameters.items()}
    return made


def _parameter(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "Y" if value else "N"
    text = str(value)
    if not isinstance(value, int | str) or not VALUE.fullmatch(text):
        raise ValueError(f"{name}: {value!r} is not valid; give one word or a number")
    return text


MODULES = Key[tuple[str, ...]]("kernel_modules", (), _modules)
MODULE_OPTIONS = Key[Options]("kernel_module_options", {}, _options)
KEYS = (MODULES, MODULE_OPTIONS)

# modprobe says what it would load; it says nothing of what is loaded or built in. A node may not have modprobe yet.
_PENDING = """
for module; do
  if ! would=$(modprobe --dry-run --verbose -- "$module" 2>&1) || [ -n "$would" ]; then echo "$module"; fi
done
"""


class PendingModules(FactBase[list[str]]):
    """Those of the given modules that are neither loaded nor built into the kernel."""

    default = list

    def command(self, modules: tuple[str, ...]) -> StringCommand:
        """One script for all modules."""
        return script(_PENDING, *modules)

    def process(self, output: list[str]) -> list[str]:
        """One name a line."""
        return output


def configure() -> None:
    """Write both files and load what is missing; without a module or an option there is no file."""
    modules, options = MODULES.here(), MODULE_OPTIONS.here()
    # Options first: a module reads them when it is loaded.
    _file("Kernel module options", OPTIONS, [_option_line(module, given) for module, given in options.items()])
    _file("Kernel modules at boot", AT_BOOT, list(modules))
    load(name="Kernel modules now", modules=modules)


def _option_line(module: str, parameters: dict[str, str]) -> str:
    return " ".join(["options", module, *(f"{name}={value}" for name, value in parameters.items())])


def _file(name: str, path: str, lines: list[str]) -> None:
    if lines:
        files.put(name=name, src=StringIO(HEADER + "\n".join(lines) + "\n"), dest=path, mode="644")
    else:
        files.file(name=name, path=path, present=False)


@operation()
def load(modules: tuple[str, ...]) -> Commands:
    """Load what is not loaded; what the running kernel does not have may wait for the one that is to run."""
    pending = host.get_fact(PendingModules, modules=modules) if modules else []
    if not pending:
        host.noop("all kernel modules are loaded")
        return
    release = kernel.awaited()
    for module in pending:
        if release:
            yield script('modprobe -- "$1" || echo "$1 is loaded when $2 runs"', module, release)
        else:
            yield StringCommand("modprobe", "--", QuoteString(module))
