"""NVIDIA's runtime in the configuration of a container engine: `nvidia-ctk runtime configure` does it, rehearsed first.

The rehearsal is the real command against the node's real files, in a mount namespace of its own where /etc is an overlay:
the node is not touched, and the engine itself can be asked what it makes of the result. (nvidia-ctk's own --dry-run prints
two files in one stream, which no engine reads.) The engine's answers for three states are compared, key by key: what it has
now, what it has by the operator's files alone, and what nvidia-ctk makes of those. Only names of keys leave the node: such
files hold passwords.

Before 2.1 containerd takes a plugin's section from the last file that has it (seen with 1.6.20), so nvidia-ctk's drop-in
hides all that other files say in that section, and its list of runtimes is the whole list. If that loses a key, the drop-in
is made from `containerd config dump` (--config-source=command), which has them all. nvidia-ctk replaces the whole entry
`nvidia`: dockerd's `runtimeArgs` there would be lost.

Run: the rehearsal, dockerd 20.10.24's reload and containerd 1.6.20's restart with what nvidia-ctk 1.20.1 wrote. Not run yet:
the way back; containerd 2; CRI-O.
"""

from __future__ import annotations

from typing import Literal

from attrs import frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.facts import FactBase
from pyinfra.api.operation import operation
from pyinfra.context import host

from tasks.common.archive import ROOT
from tasks.common.commands import Commands, refuse, script

Engine = Literal["docker", "containerd", "crio"]

SCRIPT = ROOT / "templates" / "engine-configuration.sh"


@frozen
class Rehearsal:
    """What nvidia-ctk would do. ``changes`` and ``lost`` are keys as the engine names them.

    ``lost`` are keys of the operator's that would go or change; ``pending``: the running engine has not taken its files.
    """

    faults: tuple[str, ...] = ()
    changes: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    pending: bool = False


def _command(mode: Literal["look", "apply"], engine: Engine, set_as_default: bool, cdi: bool) -> StringCommand:
    words = ("yes" if wanted else "no" for wanted in (set_as_default, cdi))
    return StringCommand("unshare", "--mount", script(SCRIPT.read_text(), mode, engine, *words))


class EngineRehearsal(FactBase[Rehearsal | None]):
    """What nvidia-ctk would do to an engine's files; None: it is not installed (yet)."""

    def command(self, engine: Engine, set_as_default: bool, cdi: bool) -> StringCommand:
        """The rehearsal, and nothing more."""
        return _command("look", engine, set_as_default, cdi)

    def process(self, output: list[str]) -> Rehearsal | None:
        """A word on each line, and what it is said of."""
        said = [line.split(" ", 1) for line in output]
        faults, changes, lost = (
            tuple(words[1] for words in said if words[0] == what) for what in ("fault", "change", "lost")
        )
        return Rehearsal(faults, changes, lost, ["pending"] in said)


@operation()
def configure(engine: Engine, set_as_default: bool, cdi: bool) -> Commands:
    """Let nvidia-ctk write the engine's files, and the engine take them; refused if that would lose what is the operator's.

    containerd and CRI-O are restarted, and containers run on; dockerd takes its file by a reload, and is restarted only
    for CDI. An engine that does not take them gets its files back as they were.
    """
    found = host.get_fact(EngineRehearsal, engine=engine, set_as_default=set_as_default, cdi=cdi)
    if found is None:
        yield refuse(f"container_runtime: {engine} cannot be configured: there is no nvidia-ctk (or no jq) on the node")
    elif found.faults:
        yield refuse("\n".join(f"container_runtime: {fault}" for fault in found.faults))
    elif found.changes and found.lost:
        yield refuse(
            f"container_runtime: {engine}: nvidia-ctk would change or take away {', '.join(found.lost)}, which is yours; "
            "take it out of the entry nvidia, or of the file that sets it (nvidia-container-runtime has its own settings, in "
            f"/etc/nvidia-container-runtime/config.toml), or take {engine} out of engines"
        )
    elif found.changes or found.pending:
        yield _command("apply", engine, set_as_default, cdi)
    else:
        host.noop(f"{engine} has NVIDIA's runtime")
