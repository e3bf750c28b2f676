"""Starts the services of NVIDIA's driver: the fabric manager, and the persistence daemon in the mode that the key asks for.

From vendor documents and from units of Ubuntu's package nvidia-compute-utils; not run on a GPU.
"""

from __future__ import annotations

from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks.common import units
from tasks.common.commands import Commands
from tasks.common.facts import FactBase
from tasks.common.systemd_reload import RELOAD, RESTART, deferred
from tasks.common.texts import HEADER, Texts, replace
from tasks.drivers.gpu_driver import fabric, modules
from tasks.host import kernel

PERSISTENCE = "nvidia-persistenced"
FABRIC_MANAGER = "nvidia-fabricmanager"
DROP_IN = f"{units.FOLDER}/{PERSISTENCE}.service.d/trackbed.conf"
NOT_PERSISTENT = "--no-persistence-mode"
"""With this option, which Ubuntu's unit has, the daemon runs, and the GPUs are not persistent (nvidia-persistenced(1))."""

NO_NVSWITCH = "its journal is above; on a node without NVSwitches give fabric_manager False"


def start(fabric_manager: bool, persistence: bool) -> None:
    """Deploy code: have the wanted services run, now and at every boot."""
    if fabric_manager:
        service(name="Fabric manager", unit=FABRIC_MANAGER, key="fabric_manager", remedy=NO_NVSWITCH)
    persistence_mode(name="Persistence mode", wanted=persistence)
    if persistence:
        service(name="Persistence daemon", unit=PERSISTENCE, key="persistence", remedy="its journal is above")


# A drop-in of the operator's may replace the package's command.
_COMMAND = """
for file in $(systemctl show --property=FragmentPath --value "$1") $(systemctl show --property=DropInPaths --value "$1"); do
  if [ "$file" != "$2" ] && [ -e "$file" ]; then sed -n 's/^ExecStart=//p' "$file"; fi
done
"""


class DaemonCommand(FactBase[str | None]):
    """The persistence daemon's command line in its unit, without Trackbed's drop-in; None: there is no such unit."""

    shell = _COMMAND
    words = (f"{PERSISTENCE}.service", DROP_IN)

    def process(self, output: list[str]) -> str | None:
        """Take the last line that is not empty: an empty one removes those before it."""
        return next((line.strip() for line in reversed(output) if line.strip()), None)


@operation()
def persistence_mode(wanted: bool) -> Commands:
    """Have a drop-in start the daemon without the option :data:`NOT_PERSISTENT`; if that is not wanted, remove the drop-in."""
    words = (host.get_fact(DaemonCommand) or "").split() if wanted else []
    text = ""
    if NOT_PERSISTENT in words:
        command = " ".join(word for word in words if word != NOT_PERSISTENT)
        text = f"{HEADER}[Service]\nExecStart=\nExecStart={command}\n"
    have = host.get_fact(Texts, paths=(DROP_IN,))
    # With the modules of another version loaded, the daemon would stop and not start again, under the jobs that use them.
    stays = host.state.is_executing and modules.reboot_due()
    want = {DROP_IN: text} if text else {}
    if have != want and deferred("the mode of nvidia-persistenced"):
        return
    yield from replace(have, want, RELOAD if stays else RELOAD + RESTART, f"{PERSISTENCE}.service")


@operation()
def service(unit: str, key: str, remedy: str) -> Commands:
    """Have a service of the driver run, now and at every boot; with a reboot due, after that."""
    if kernel.skip_until_booted(f"{unit} is started"):
        return
    if host.state.is_executing and (modules.reboot_due() or (unit == FABRIC_MANAGER and fabric.awaits_reboot())):
        host.noop(f"{unit} is started once its drivers are loaded")
        return
    missing = f"the node has no {unit}.service, which a package of the driver brings: install that, or give {key} False"
    yield from units.enable(
        f"{unit}.service", f"gpu_driver.{key}: {missing}", f"gpu_driver.{key}: {unit} does not start; {remedy}"
    )
