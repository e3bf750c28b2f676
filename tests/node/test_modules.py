"""Kernel modules that the deploy wants at every boot, and their options: loaded now, with those values."""

import re

import pytest

from tests.node.evidence import Finding, Node, equal, judge

pytestmark = pytest.mark.modules

AT_BOOT = "/etc/modules-load.d/trackbed.conf"
OPTIONS = "/etc/modprobe.d/trackbed.conf"


def lines(node: Node, path: str) -> list[str]:
    text = node.run('if [ -e "$1" ]; then cat "$1"; fi', path)
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def test_each_module_is_loaded(node: Node) -> None:
    loaded = {line.split()[0] for line in node.run("cat /proc/modules").splitlines()}
    built_in = set(re.findall(r"/([^/]+)\.ko$", node.run("cat /lib/modules/$(uname -r)/modules.builtin"), re.MULTILINE))
    known = {name.replace("-", "_") for name in loaded | built_in}
    findings = [
        Finding(name, "kernel module", "loaded or built in", "neither", name.replace("-", "_") in known)
        for name in lines(node, AT_BOOT)
    ]
    judge(node, findings, f"{AT_BOOT} names no module")


def test_each_option_is_in_force(node: Node) -> None:
    findings = []
    for line in lines(node, OPTIONS):
        _, module, *given = line.split()
        for name, _, value in (option.partition("=") for option in given):
            # A parameter without a file cannot be read back.
            script = 'f=/sys/module/"$1"/parameters/"$2"; if [ -r "$f" ]; then cat "$f"; else echo "$3"; fi'
            found = node.run(script, module.replace("-", "_"), name, value).strip()
            findings.append(equal(module, f"parameter {name}", value, found))
    judge(node, findings, f"{OPTIONS} gives no option")
