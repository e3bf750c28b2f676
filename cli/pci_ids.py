"""The names of PCI devices in the text of pci.ids."""

import re

# Debian's folder, then that of the RPM distributions.
PATHS = ("/usr/share/misc/pci.ids", "/usr/share/hwdata/pci.ids")


def name(text: str, vendor: str, device: str) -> str:
    """A device's name: vendor and device as lspci prints them, or the vendor alone."""
    # The text has a megabyte: searching it with a pattern would take longer than everything else in `trackbed inspect`.
    start = text.find(f"\n{vendor}  ") + 1 if vendor else 0
    section = re.compile(r"\w+  (.*)\n((?:[\t#].*\n|\n)*)").match(text, start) if start else None
    if section is None:
        return ""
    match = re.search(rf"^\t{re.escape(device)}  (.*)$", section[2], re.MULTILINE)
    return f"{section[1]} {match[1]}" if match else section[1]
