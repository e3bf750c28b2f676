"""Loads the sysctls that must be set at boot, before the agent runs or without it, and reads them back."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import frozen
from pyinfra.api.command import StringCommand
from pyinfra.api.operation import OperationMeta, operation
from pyinfra.context import host

from agent.spec.sysctl_names import SYSCTL, meaning, name_to_use, path, zeroed_by
from tasks.common.commands import Commands, changes, refuse, script, warn
from tasks.common.facts import FactBase, Yes

PATH = "/etc/sysctl.d/90-trackbed.conf"

KUBELET_VALUES = {
    "kernel.keys.root_maxbytes": "25000000",
    "kernel.keys.root_maxkeys": "1000000",
    "kernel.panic": "10",
    "kernel.panic_on_oops": "1",
    "vm.overcommit_memory": "1",
    "vm.panic_on_oom": "0",
}
"""What the kubelet sets when it starts, or demands if it protects them (setupKernelTunables, pkg/kubelet/cm)."""

KUBELET_FILES = (
    "var/lib/kubelet/config* var/lib/kubelet/kubeadm-flags.env etc/default/kubelet etc/sysconfig/kubelet etc/kubernetes "
    "etc/rancher etc/systemd/system var/lib/rancher/*/agent/etc var/lib/k0s/kubelet-config.yaml"
)
"""Where a kubelet's settings are: its own files are YAML or JSON. Those of kubespray and EKS are in /etc/kubernetes, those of
k3s in its agent's folder."""

# RKE2's profile for CIS includes it (docs.rke2.io/security/hardening_guide).
_PROTECTED = (
    r"""
pattern='(^|[{,])[[:space:]]*"?protectKernelDefaults"?:[[:space:]]*true|^protect-kernel-defaults: *"?true|^profile: *"?cis'
pattern=$pattern'|--protect-kernel-defaults(=true|[[:space:]"]|$)'
cd "$1/"
"""
    f'if grep -qsrE -e "$pattern" -- {KUBELET_FILES}; then echo protected; fi\n'
)


class ProtectedDefaults(Yes):
    """Whether the node's kubelet does not start if the kernel has other values than :data:`KUBELET_VALUES`."""

    shell = _PROTECTED


@operation()
def suit_kubelet(others: tuple[str, ...]) -> Commands:
    """Refuse values with which the kubelet would not start.

    :param others: the names of :data:`KUBELET_VALUES` that get another value.
    """
    if not host.get_fact(ProtectedDefaults):
        host.noop("the kubelet protects no sysctls")
        return
    demanded = ", ".join(f"{name} = {KUBELET_VALUES[name]}" for name in others)
    yield refuse(
        f"sysctls: this node's kubelet starts only with {demanded} (protectKernelDefaults); give these values, leave the names "
        "out, or end the protection"
    )


_VALUES = 'for path; do if [ -r "$path" ]; then echo "$path $(cat "$path")"; fi; done'


class SysctlValues(FactBase[dict[str, str]]):
    """The values of sysctls, by path."""

    default = dict

    def command(self, paths: tuple[str, ...]) -> StringCommand:
        """Read the files."""
        return self.script(_VALUES, *paths)

    def process(self, output: list[str]) -> dict[str, str]:
        """Parse lines of path and value; runs of white space become one space."""
        return {path: " ".join(value.split()) for path, _, value in (line.partition(" ") for line in output)}


# In the order of sysctl.d(5): of files with one name, that of the first folder counts, and the last name is read last.
_LATER = """
seen=
for folder in "$2/etc" "$2/run" "$2/usr/local/lib" "$2/usr/lib" "$2/lib"; do
  for file in "$folder"/sysctl.d/*.conf; do
    name=${file##*/}
    case " $seen " in *" $name "*) continue ;; esac
    case $name in *[[:space:]]*) continue ;; esac
    [ -r "$file" ] || continue
    seen="$seen $name"
    # Nothing is read from a folder or /dev/null, but it takes the place of a file of its name (files_add in systemd).
    [ -f "$file" ] || continue
    [ "$(printf '%s\\n' "$name" "$1" | sort | tail -n 1)" != "$1" ] || continue
    awk -v at="$name ${file#"$2"} " '/^[ \\t]*-?[A-Za-z0-9][^=]*=/ { sub(/^[ \\t]*-?/, ""); print at $0 }' "$file"
  done
done | sort -s -k 1,1
"""


@frozen
class Setting:
    """A line of a file in sysctl.d."""

    file: str
    name: str
    value: str


class LaterSettings(FactBase[list[Setting]]):
    """The settings that a boot makes after ours, in their order. A name with wildcards yields to a full one (sysctl.d(5))."""

    default = list
    shell = _LATER
    words = (PATH.rpartition("/")[2],)

    def process(self, output: list[str]) -> list[Setting]:
        """Parse lines of a file's name and path, and `name=value`."""
        lines = (line.split(" ", 2)[1:] for line in output)
        return [
            Setting(file, name.strip(), value.strip())
            for file, (name, _, value) in ((file, text.partition("=")) for file, text in lines)
            if "*" not in name
        ]


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
        return
    later: list[Setting] = host.get_fact(LaterSettings)
    overridden = [
        f"boot.sysctls: a boot reads {setting.file} after {PATH}, and that sets {name} to {value}, not {wanted[name]}; remove "
        f"{setting.name} there"
        for name, (setting, value) in _overridden(wanted, later).items()
    ]
    if overridden:
        yield refuse("\n".join(overridden))


def _overridden(wanted: Mapping[str, str], later: list[Setting]) -> dict[str, tuple[Setting, str]]:
    """The sysctls to which later settings give another value: by name, the setting that does so, and that value."""
    last: dict[str, tuple[Setting, str]] = {}
    for setting in later:
        if SYSCTL.fullmatch(setting.name):
            name = name_to_use(setting.name)
            last[name] = setting, setting.value
            if other := zeroed_by(name, setting.value):
                last[other] = setting, "0"
    values = {name: last[name] for name in sorted(wanted) if name in last}
    return {name: given for name, given in values.items() if meaning(name, given[1]) != meaning(name, wanted[name])}


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
