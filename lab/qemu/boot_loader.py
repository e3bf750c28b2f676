"""Boots a node by grub. Otherwise QEMU gives the node its kernel, and a boot loader's settings have no effect.

Grub's core is on a small disk of its own, and reads the menu that the node's own update-grub has written. So kernels and kernel
arguments are chosen as on a server, and take effect at a reboot.

The node needs the packages grub2-common and grub-pc-bin.
"""

import base64
from pathlib import Path

import attrs

from lab.node import Node

# Grub finds the file system by its label. A menu of Debian's needs these modules.
_CORE = """\
serial --unit=0 --speed=115200
terminal_input serial
terminal_output serial
search --label root --set=root
set prefix=($root)/boot/grub
configfile /boot/grub/grub.cfg
"""
_MODULES = (
    *("biosdisk", "ext2", "search", "search_label", "search_fs_uuid", "configfile", "normal", "linux", "echo", "test"),
    *("serial", "terminal", "loadenv", "gzio", "minicmd", "gettext", "gfxterm", "all_video", "sleep", "reboot"),
)

# The arguments that QEMU gave the kernel are put into the menu, for all entries.
_MAKE = """
core=$1; shift
given=$(sed 's/root=[^ ]*//; s/ rw / /' /proc/cmdline)
printf 'GRUB_DEFAULT=0\\nGRUB_TIMEOUT=0\\nGRUB_TERMINAL=serial\\nGRUB_CMDLINE_LINUX="%s"\\n' "$given" > /etc/default/grub
mkdir -p /boot/grub
update-grub >&2
work=$(mktemp -d); trap 'rm -rf "$work"' EXIT
printf %s "$core" > "$work/core.cfg"
grub-mkimage -O i386-pc -p /boot/grub -c "$work/core.cfg" -o "$work/core.img" "$@"
cat /usr/lib/grub/i386-pc/boot.img "$work/core.img" | base64
"""
# The size of the boot loader's disk. QEMU needs whole sectors.
_SIZE = 4 << 20


def install(node: Node, loader: Path) -> Node:
    """Install a boot loader, and power the node off and on by it.

    ``loader``: the file on this host for its disk. Returns the same node with that disk. An earlier snapshot is of a machine
    without the disk: power the node off before you restore one.
    """
    disk = base64.b64decode(node.run(["sh", "-euc", _MAKE, "sh", _CORE, *_MODULES], timeout=300, check=True).stdout)
    loader.write_bytes(disk.ljust(_SIZE, b"\0"))
    node.sh("sync")
    node.power_cut()
    loaded = attrs.evolve(node, loader=loader)
    loaded.boot()
    return loaded
