"""Collects in one archive what support needs to know about a node, without secrets.

Each part is the output of a program with a deadline, even if it is a file: a read of sysfs may never return. The archive lists
the parts that failed or took too long.
"""

from __future__ import annotations

import io
import json
import os
import re
import tarfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from attrs import frozen

from agent.hardware.functions import NET, PCI, RDMA
from cli.programs import Ran, run

DEADLINE = 20.0
"""Seconds for each collector."""

REMOVED = "[removed]"

_WORDS = r"token|password|passwd|passphrase|secret|credential|(?:api|private|access)[_-]?key"
_QUOTED = r'"(?:[^"\\]|\\.)*"'
# Only from the start of a word: a search from each of its characters would take hours for a word of a million.
_NAMED_SO = rf"(?<![\w.-])[\w.-]*(?:{_WORDS})[\w.-]*"
# What the first group matches stays.
_PATTERNS = (
    r"(?s)()-----BEGIN [A-Z ]*(?:PRIVATE KEY|CERTIFICATE)-----.*?(?:-----END [A-Z ]*-----|\Z)",
    # `Authorization: Bearer x`, before the general form, which would stop at the first word. Digest has quotation marks.
    r"(?i)\b(authorization[\"']?\s*[:=]\s*[\"']?)(?:digest\s[^\n]*|[a-z-]+[ \t]+[^\s\"',;]+|[^\s\"',;]+)",
    r"(?i)\b(bearer\s+)[\w.~+/=-]{8,}",
    # name=value, name: value, "name": "value", --name value
    rf"(?i)({_NAMED_SO}[\"']?\s*[=:]\s*)(?:{_QUOTED}|'[^']*'|[^\s,;&]+)",
    rf"(?i)((?=-){_NAMED_SO}\s+)(?!-)\S+",
    # DB_PASS=value in an environment: only there is the short word no part of another, such as `first-pass`.
    rf"([A-Z0-9]_PASS=)(?:{_QUOTED}|'[^']*'|\S+)",
    # curl -u user:password
    r"(\s(?:-u|--user)[\s=]\s*['\"]?[^\s:'\"]+:)[^\s'\"]+",
    # A user's name without a password may be a token at a web server, but not with ssh.
    r"(?i)\b(https?://)[^/\s@]+(?=@)",
    r"(?i)\b([a-z][a-z0-9+.-]{0,30}://)[^/\s:@]*:[^/\s@]*(?=@)",
    # netroot=iscsi:user:password@server, a kernel argument: https://man7.org/linux/man-pages/man7/dracut.cmdline.7.html
    r"\b(iscsi:)[^\s@]+(?=@)",
    # The login at a registry, in files of container engines.
    r"(?i)(\"(?:auth|identitytoken|registrytoken)\"\s*:\s*\")(?:[^\"\\]|\\.)*(?=\")",
    # A JSON Web Token; a bootstrap token of kubeadm.
    r"()\beyJ[\w-]{8,}\.[\w-]+\.?[\w-]*",
    r"()\b[a-z0-9]{6}\.[a-z0-9]{16}\b",
)


def redact(text: str) -> str:
    """The text without tokens, passwords and keys, recognised by their form or their name."""
    for pattern in _PATTERNS:
        text = re.sub(pattern, rf"\1{REMOVED}", text)
    return text


@frozen
class Collector:
    """A file of the archive, and the program that prints its content. ``fine``: exit codes that are no failure."""

    name: str
    command: tuple[str, ...]
    fine: frozenset[int] = frozenset({0})


ANY_ANSWER = frozenset({0, 1, 2})
"""Exit codes that are no failure: those of Trackbed's commands describe the node, and grep may find nothing or miss a file."""


def collectors(trackbed: Iterable[str], folders: Iterable[Path]) -> Iterator[Collector]:
    """What is collected on this node.

    :param trackbed: the command line of trackbed.
    :param folders: the agent's folders: of its spec, its report and its history.
    """
    own = tuple(trackbed)
    for subcommand in ("inspect", "plan", "status", "doctor"):
        yield Collector(f"trackbed/{subcommand}.json", (*own, subcommand, "--json"), ANY_ANSWER)
    yield Collector("trackbed/doctor.txt", (*own, "doctor"), ANY_ANSWER)
    yield Collector("trackbed/version.txt", (*own, "--version"))
    kept = [path for folder in folders for path in sorted(folder.glob("*.json*"))]
    for path in (*kept, *(path for path in map(Path, FILES) if path.exists())):
        yield Collector(f"files{path}", ("cat", str(path)))
    yield from (Collector(name, tuple(command.split())) for name, command in PROGRAMS)
    for name, folder, pattern, files in ATTRIBUTES:
        # Without a path grep would read the working directory. It enters no links in a folder, as to a PCI device.
        if paths := sorted(map(str, Path(folder).glob(pattern))):
            yield Collector(name, ("grep", "-rHs", "", *(f"--include={file}" for file in files), *paths), ANY_ANSWER)
    for device in sorted(path.parent.name for path in Path(NET).glob("*/device")):
        for option in ("-i", "-k", "-l", "-g", "-S"):
            yield Collector(f"ethtool/{device}{option}.txt", ("ethtool", option, device))


# Globbing reads only directories, which never hangs.
ATTRIBUTES = (
    ("sriov.txt", PCI, "*/sriov_*", ("sriov_*",)),
    ("rdma-ports.txt", RDMA, "*", ("node_guid", "fw_ver", "state", "phys_state")),
    ("irq-affinity.txt", "/proc/irq", "*", ("smp_affinity_list", "effective_affinity_list")),
    ("steering.txt", NET, "*/queues", ("rps_cpus", "rps_flow_cnt", "xps_cpus")),
)

FILES = (
    "/proc/cmdline",
    "/proc/interrupts",
    "/proc/cpuinfo",
    "/proc/meminfo",
    "/proc/modules",
    "/proc/mounts",
    "/etc/os-release",
    "/etc/modules-load.d/trackbed.conf",
    "/etc/modprobe.d/trackbed.conf",
)

PROGRAMS = (
    ("uname.txt", "uname -a"),
    ("uptime.txt", "uptime"),
    ("dmesg.txt", "dmesg --ctime"),
    ("journal.txt", "journalctl --boot --no-pager --output=short-precise --lines=5000 --unit=trackbed*"),
    (
        "journal-previous-boot.txt",
        "journalctl --boot=-1 --no-pager --output=short-precise --lines=2000 --unit=trackbed*",
    ),
    (
        "systemd/show.txt",
        "systemctl show trackbed.service --property=ActiveState,SubState,Result,NRestarts,ExecMainStatus",
    ),
    ("systemd/unit.txt", "systemctl cat trackbed*"),
    ("systemd/failed.txt", "systemctl --failed --no-pager"),
    ("lspci.txt", "lspci -Dnnvv"),
    ("ip-link.txt", "ip -details link"),
    ("ip-address.txt", "ip address"),
    ("ip-route.txt", "ip route show table all"),
    ("ip-netns.txt", "ip netns"),
    ("rdma-link.txt", "rdma link"),
    ("rdma-resource.txt", "rdma resource"),
    ("rdma-statistic.txt", "rdma statistic"),
    ("rdma-system.txt", "rdma system"),
    ("dcb.txt", "dcb -s app show"),
    ("numa.txt", "lscpu --extended"),
)


def write(path: Path, wanted: Iterable[Collector], deadline: float = DEADLINE) -> dict[str, str]:
    """Run all collectors, one after the other, and write the archive, which only its owner can read.

    :returns: the parts that failed, and why.
    :raises OSError: the archive cannot be written. Nothing of it is left.
    """
    failed: dict[str, str] = {}
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as raw, tarfile.open(fileobj=raw, mode="w:gz") as tar:
            _write_parts(tar, wanted, deadline, failed)
    except BaseException:
        # A part of an archive is of no use, and would keep a full file system full.
        path.unlink(missing_ok=True)
        raise
    return failed


def _write_parts(tar: tarfile.TarFile, wanted: Iterable[Collector], deadline: float, failed: dict[str, str]) -> None:
    for collector in wanted:
        try:
            ran = run(list(collector.command), deadline)
        except OSError as error:
            failed[collector.name] = f"{collector.command[0]}: {error.strerror}"
            continue
        if trouble := _trouble(ran, collector, deadline):
            failed[collector.name] = f"{' '.join(collector.command[:6])}: {trouble}"
        _add(tar, collector.name, redact(ran.output))
    _add(tar, "not-collected.json", json.dumps(failed, indent=2, sort_keys=True) + "\n")


def _trouble(ran: Ran, collector: Collector, deadline: float) -> str:
    if ran.code is None:
        return f"it did not end within {deadline:.0f} s"
    return "" if ran.code in collector.fine else f"exit code {ran.code}"


def _add(tar: tarfile.TarFile, name: str, text: str) -> None:
    content = text.encode()
    entry = tarfile.TarInfo(f"trackbed-bundle/{name.lstrip('/')}")
    entry.size, entry.mtime, entry.mode = len(content), int(time.time()), 0o600
    tar.addfile(entry, io.BytesIO(content))
