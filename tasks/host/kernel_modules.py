"""Loads kernel modules, now and at every boot, and sets their options."""

from __future__ import annotations

import re
from collections.abc import Sequence

from pyinfra.api.command import StringCommand
from pyinfra.api.operation import operation
from pyinfra.context import host

from agent.spec.node import MODULE_NAME
from tasks import reboot
from tasks.common.commands import Commands, script
from tasks.common.data import Key
from tasks.common.facts import Lines
from tasks.common.texts import HEADER, Present, written
from tasks.host import kernel

AT_BOOT = "/etc/modules-load.d/trackbed.conf"
OPTIONS = "/etc/modprobe.d/trackbed.conf"
DRACUT = "/usr/bin/dracut"
DRACUT_ITEMS = "/etc/dracut.conf.d/90-trackbed.conf"
LEFTOVERS = (DRACUT_ITEMS,)

# modprobe drops a backslash, and joins a line that ends in one with the next (getline_wrapped in kmod's libkmod-config.c). The
# kernel joins parameters up to the next quotation mark (next_arg in lib/cmdline.c).
VALUE = re.compile(r"[!#-\[\]-~]+")

Options = dict[str, dict[str, str]]


def _modules(value: object) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{value!r} is not a list; give module names, such as ['ib_umad', 'rdma_ucm']")
    for name in value:
        if not isinstance(name, str) or not MODULE_NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a module name; give it as lsmod prints it")
    return tuple(value)


def _options(value: object) -> Options:
    if not isinstance(value, dict) or not all(isinstance(parameters, dict) for parameters in value.values()):
        raise ValueError(f"{value!r} is not valid; give {{'module': {{'parameter': 'value'}}}}")
    options: Options = {}
    for module, parameters in value.items():
        _modules([module])
        for name in parameters:
            if not isinstance(name, str) or not MODULE_NAME.fullmatch(name):
                raise ValueError(f"{module}: {name!r} is not a parameter; give it as `modinfo -p {module}` prints it")
        options[module] = {name: _parameter(name, setting) for name, setting in parameters.items()}
    return options


def _parameter(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "Y" if value else "N"
    text = str(value)
    if not isinstance(value, int | str) or not VALUE.fullmatch(text):
        raise ValueError(f'{name}: {value!r} is not valid; give one word without \\ and ", or a number')
    return text


# They make the character devices that device plugins and rdma-core's tools need.
MODULES = Key[tuple[str, ...]]("kernel_modules", ("ib_uverbs", "ib_umad", "rdma_ucm"), _modules)
MODULE_OPTIONS = Key[Options]("kernel_module_options", {}, _options)

# modprobe prints what it would load, and nothing for a module that is loaded or built in. If modprobe is not installed yet, all
# modules are pending.
_PENDING = """
for module; do
  if ! would=$(modprobe --dry-run --verbose -- "$module" 2>/dev/null) || [ -n "$would" ]; then echo "$module"; fi
done
"""


class PendingModules(Lines):
    """The given modules that are neither loaded nor built into the kernel."""

    def command(self, modules: tuple[str, ...]) -> StringCommand:
        """Test each module."""
        return self.script(_PENDING, *modules)


# Ubuntu and RHEL have modules in packages of their own, which images for clouds leave out. A line of hardening guides, `install
# MODULE /bin/true`, lets modprobe succeed without the module.
_LOAD = """
code=0
modprobe -- "$1" || code=$?
case $(modprobe --dry-run --verbose -- "$1" 2>/dev/null) in
"install "*)
  echo "kernel_modules: a line \\`install $1\\` in /etc/modprobe.d keeps modprobe from loading it; remove that line, or" \\
    "remove $1 from kernel_modules" >&2
  exit 1 ;;
esac
[ "$code" != 0 ] || exit 0
if [ "$(cat "${MACHINE:-}/proc/sys/kernel/modules_disabled" 2>/dev/null)" = 1 ]; then
  echo "kernel_modules: the kernel loads no more modules in this boot (kernel.modules_disabled); reboot, so that" \\
    "$1 is loaded before that is set" >&2
  exit 1
fi
kernel=$(uname -r)
if ! modinfo "$1" >/dev/null 2>&1; then
  echo "kernel_modules: the kernel $kernel has no module $1; install the package with the kernel's other modules" \\
    "(linux-modules-extra-$kernel on Ubuntu, kernel-modules-$kernel or kernel-modules-extra-$kernel on RHEL)," \\
    "run a kernel that has it (kernel.release), or remove it from kernel_modules" >&2
fi
exit 1
"""


def set_options() -> None:
    """Write the file of options, or remove it. It comes before the tasks that install drivers.

    A module reads its options when it is loaded, as a driver's package may do, and the initramfs of a new kernel has those of
    its installation. In one that dracut makes without its option hostonly, as images for clouds have it, there is no file of
    /etc/modprobe.d otherwise (modules.d/80base in dracut). There a module would have no options, and nouveau would be loaded.
    """
    if host.get_fact(Present, paths=(DRACUT,)):
        items = f'{HEADER}install_optional_items+=" /etc/modprobe.d/trackbed*.conf "\n'
        written(name="Kernel module options in the initramfs", path=DRACUT_ITEMS, text=items)
    lines = [_option_line(name, parameters) for name, parameters in MODULE_OPTIONS.here().items()]
    written(name="Kernel module options", path=OPTIONS, text=_text(lines))


def configure() -> None:
    """Write the file of modules, or remove it, and load the modules that are not loaded."""
    modules = MODULES.here()
    written(name="Kernel modules at boot", path=AT_BOOT, text=_text(modules))
    load(name="Kernel modules now", modules=modules)


def _option_line(module: str, parameters: dict[str, str]) -> str:
    return " ".join(["options", module, *(f"{name}={value}" for name, value in parameters.items())])


def _text(lines: Sequence[str]) -> str:
    return HEADER + "\n".join(lines) + "\n" if lines else ""


@operation()
def load(modules: tuple[str, ...]) -> Commands:
    """Load the modules that are not loaded. While another kernel or driver is to run, one that does not load is no error."""
    pending = host.get_fact(PendingModules, modules=modules) if modules else []
    if not pending:
        host.noop("all kernel modules are loaded")
        return
    # The reboot comes after this task.
    waits = kernel.pending_release() or reboot.awaited_by(*kernel.BUILT_BY_DKMS)
    for module in pending:
        if waits:
            yield script('modprobe -- "$1" || echo "$1 is loaded at the next boot"', module)
        else:
            yield script(_LOAD, module)
