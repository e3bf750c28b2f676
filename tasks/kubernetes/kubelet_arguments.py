"""The arguments that the operator gives the kubelet by KUBELET_EXTRA_ARGS, read as systemd reads them."""

from __future__ import annotations

import re

from attrs import frozen

from tasks.common.facts import FactBase

ENVIRONMENT = "/etc/trackbed/kubelet-registration.env"
"""The file in which Trackbed repeats them, with its own ones after them."""


@frozen
class KubeletArguments:
    """The operator's KUBELET_EXTRA_ARGS, and whether the kubelet's unit passes them on (None: there is no unit).

    ``taints``: those that kubeadm or the kubelet's configuration gives it, which --register-with-taints there overrides.
    """

    arguments: str
    passes_them_on: bool | None
    taints: tuple[str, ...] = ()


# systemd joins a line that ends in a backslash with the next one. A file that the unit or a drop-in names overrides
# Environment= and the files before it; an empty name forgets those. $2 is Trackbed's own. Without a unit, kubeadm's will come.
_KUBELET = """
unit=$(systemctl cat kubelet.service 2>/dev/null) || unit=
systemctl show --property=Environment kubelet.service 2>/dev/null | sed -n 's/^Environment=/environment /p'
if [ "$unit" ]; then
  printf '%s\\n' "$unit" | awk '
    sub(/^EnvironmentFile=-?/, "") { if ($0) file[n++] = $0; else n = 0 }
    END { while (i < n) print file[i++] }'
else printf '%s\\n' /etc/default/kubelet /etc/sysconfig/kubelet
fi | while read -r f; do
  [ "$f" != "$2" ] && [ -r "$1$f" ] || continue
  sed -n -e ':join' -e '/\\\\$/ { $!{ N; s/\\\\\\n//; b join' -e '} }' \\
    -e 's/^[[:space:]]*KUBELET_EXTRA_ARGS=/arguments /p' "$1$f"
done
kubelet=$1/var/lib/kubelet
sed -nE 's/.*--register-with-taints[= ]([^ "]+).*/taints \\1/p' "$kubelet/kubeadm-flags.env" 2>/dev/null || true
if grep -qs '^registerWithTaints: *$' "$kubelet/config.yaml"; then echo 'taints registerWithTaints'; fi
case "$unit" in "") ;; *'$KUBELET_EXTRA_ARGS'*|*'${KUBELET_EXTRA_ARGS}'*) echo passes ;; *) echo drops ;; esac
"""


class NodeKubelet(FactBase[KubeletArguments]):
    """How the node's kubelet is started."""

    @staticmethod
    def default() -> KubeletArguments:
        """No kubelet is installed yet. The unit of kubeadm's package will pass the arguments on."""
        return KubeletArguments("", None)

    shell = _KUBELET
    words = ("", ENVIRONMENT)

    def process(self, output: list[str]) -> KubeletArguments:
        """Parse a line for the environment, one for each file with arguments or taints, and one for the unit."""
        arguments = [
            _environment(line.removeprefix("environment ")) for line in output if line.startswith("environment")
        ]
        arguments += [_unquoted(line.removeprefix("arguments ")) for line in output if line.startswith("arguments")]
        words = {"passes": True, "drops": False}
        passes_them_on = next((words[line] for line in output if line in words), None)
        taints = tuple(line.removeprefix("taints ") for line in output if line.startswith("taints "))
        return KubeletArguments(arguments[-1] if arguments else "", passes_them_on, taints)


_WORD = re.compile(r'"((?:[^"\\]|\\.)*)"|(\S+)')


def _environment(text: str) -> str:
    """The arguments in a unit's environment, as `systemctl show` prints it: words, quoted where needed.

    An older systemd (239 of RHEL 8) quotes no word, and prints a space as \\x20 (bus-print-properties.c, formerly bus-util.c).
    """
    words = (
        re.sub(r"\\x([0-9a-f]{2})", lambda code: chr(int(code[1], 16)), plain) if plain else _unquoted(f'"{quoted}"')
        for quoted, plain in _WORD.findall(text)
    )
    given = [value for name, _, value in (word.partition("=") for word in words) if name == "KUBELET_EXTRA_ARGS"]
    return given[-1] if given else ""


def _unquoted(text: str) -> str:
    """A value as systemd reads it (systemd.exec(5), EnvironmentFile=; load_env_file in systemd's env-file.c)."""
    quoted = re.fullmatch(r'\s*"(.*)"\s*|\s*\'(.*)\'\s*', text)
    if quoted is None:
        return re.sub(r"\\(.?)", r"\1", text).strip()
    return quoted[2] if quoted[1] is None else re.sub(r'\\(["\\$`])', r"\1", quoted[1])


def quoted(text: str) -> str:
    """A value for a file that systemd reads."""
    # systemd.exec(5), EnvironmentFile=: within double quotes a backslash escapes these four characters.
    return '"' + re.sub(r'(["\\$`])', r"\\\1", text) + '"'
