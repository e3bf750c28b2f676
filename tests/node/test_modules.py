"""Kernel modules that the deploy wants at every boot, and their options: loaded now, with those values."""

import re
from collections.abc import Iterator

import pytest

from tests.node.evidence import Finding, Node, equal, judge

pytestmark = pytest.mark.modules

# Ours all begin so: those of the key kernel_modules, and those of tasks that bring a driver.
AT_BOOT = "/etc/modules-load.d/trackbed*.conf"
OPTIONS = "/etc/modprobe.d/trackbed*.conf"


def lines(node: Node, pattern: str) -> list[str]:
    text = node.run('for file in $1; do if [ -e "$file" ]; then cat "$file"; fi; done', pattern)
    return [line for line in text.splitlines() if line.strip() and not line.startswith("#")]


def loaded(node: Node) -> list[Finding]:
    modules = {line.split()[0] for line in node.run("cat /proc/modules").splitlines()}
    built_in = node.run("cat /lib/modules/$(uname -r)/modules.builtin")
    modules |= {name.replace("-", "_") for name in re.findall(r"/([^/]+)\.ko$", built_in, re.MULTILINE)}
    return [
        Finding(name, "kernel module", "loaded or built in", "neither", name.replace("-", "_") in modules)
        for name in lines(node, AT_BOOT)
    ]


def in_force(node: Node) -> Iterator[Finding]:
    for line in lines(node, OPTIONS):
        word, module, *given = line.split()
        if word != "options":
            continue
        for name, _, value in (option.partition("=") for option in given):
            # A parameter without a file cannot be read back.
            script = 'f=/sys/module/"$1"/parameters/"$2"; if [ -r "$f" ]; then cat "$f"; else echo "$3"; fi'
            actual = node.run(script, module.replace("-", "_"), name, value).strip()
            if actual in ("Y", "N"):
                # The kernel prints these for a boolean parameter, and also accepts 1, y and others.
                value = {"1": "Y", "y": "Y", "0": "N", "n": "N"}.get(value, value)
            yield equal(module, f"parameter {name}", shown(value), shown(actual))


def shown(value: str) -> str:
    """A number in decimal notation: the kernel takes 0x1f, and prints 31 (hexint: 0x0000001f)."""
    try:
        return str(int(value, 0))
    except ValueError:
        return value


def test_modules_are_loaded_with_their_options(node: Node) -> None:
    judge(node, [*loaded(node), *in_force(node)], f"{AT_BOOT} and {OPTIONS} name nothing")
