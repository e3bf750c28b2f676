"""A boot loader for a node, which QEMU otherwise gives its kernel: grub, on a small disk of its own, reads the menu that the
node's own update-grub has written. So kernel arguments and kernels come to be as on a server, and a reboot shows them.

The node needs the packages grub2-common and grub-pc-bin.
"""

import base64
from pathlib import Path

import attrs

from lab.node import Node

# grub has no other name for the file system here; the modules are those that a menu of Debian's asks for.
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

# What QEMU would have given the kernel comes from the menu now, for all entries.
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
# Of a disk; QEMU wants whole sectors.
_SIZE = 4 << 20


def install(node: Node, loader: Path) -> Node:
    """Power the node off and on again by its own boot loader, whose disk is to be that file of this host.

    What is returned is the same node. A snapshot that was made before is of another machine, without that disk: power the
    node off before it is restored.
    """
    disk = base64.b64decode(node.run(["sh", "-euc", _MAKE, "sh", _CORE, *_MODULES], timeout=300, check=True).stdout)
    loader.write_bytes(disk.ljust(_SIZE, b"\0"))
    node.sh("sync")
    node.power_cut()
    loaded = attrs.evolve(node, loader=loader)
    loaded.boot()
    return loaded
