"""Simulates many hosts on one machine, to measure a deploy: one sshd on many loopback addresses.

All addresses lead to one simulated node: an overlay of this machine's root file system, with processes and mounts of its own,
so that nothing on this machine changes. ssh, shell, files, the packages' database and the agent are real; a script replaces
systemd and starts a unit's ExecStart. The login shell has no start-up files.

All hosts run their programs on this machine's cores. :meth:`Fleet.replay` avoids most of that work: each script of facts is
run once, and every host returns that answer.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import click
from attrs import frozen

from lab import apt
from lab.command import run
from lab.instance import free_port
from lab.repository import cached

START_S = 20.0

PACKAGES = ("openssh-server", "libwrap0")
"""The packages that the node has besides this machine's own: the ssh server, and a library that it needs."""

# $1: a folder of ours; $2: sshd and what it needs. The new root has this machine's devices, and a /run of its own.
_ENTER = """
work=$1
mount --make-rprivate /
mount -t tmpfs none "$work/over"
mkdir "$work/over/upper" "$work/over/work"
mount -t overlay overlay -o "lowerdir=/,upperdir=$work/over/upper,workdir=$work/over/work" "$work/root"
for folder in dev sys; do mount --rbind "/$folder" "$work/root/$folder"; done
mount -t proc proc "$work/root/proc"
mount -t tmpfs none "$work/root/run"
mount -t tmpfs none "$work/root/tmp"
tar -C "$2" -c . | tar -C "$work/root" -x --keep-directory-symlink
mkdir -p "$work/root/run/sshd" "$work/root/run/bench"
cp "$work"/node/* "$work/root/run/bench"
install -m 755 "$work/node/systemctl" "$work/root/usr/local/bin/systemctl"
exec chroot "$work/root" /bin/sh -e /run/bench/start
"""

# Inside. What the base packages of the deploy lack here counts as installed: the deploy asks dpkg's database alone.
_START = """
grep -q ^sshd: /etc/passwd || echo sshd:x:65533:65534::/run/sshd:/usr/sbin/nologin >> /etc/passwd
chmod 755 /run/bench/shell
sed -i 's,^\\(root:.*:\\).*:.*$,\\1/run/bench/home:/run/bench/shell,' /etc/passwd
mkdir -p /run/bench/home
for package in $(cat /run/bench/packages); do
  status=$(dpkg-query --show --showformat='${db:Status-Status}' "$package" 2>/dev/null || true)
  [ "$status" = installed ] || printf '
Package: %s
Status: install ok installed
Maintainer: bench
Architecture: all
Version: 1
Description: stands for the real one
' "$package" >> /var/lib/dpkg/status
done
exec /usr/sbin/sshd -D -e -f /run/bench/sshd_config
"""

_SYSTEMCTL = """#!/bin/sh
# What the deploy asks of systemd, for services that are one process.
state=/run/bench/units
mkdir -p "$state"
verb=
show=
for word; do
  case "$word" in
    --property=*) show=${word#--property=} ;;
    -*) ;;
    *) if [ -z "$verb" ]; then verb=$word; else unit=$word; fi ;;
  esac
done
pid() { cat "$state/$unit.pid" 2>/dev/null || echo 0; }
active() { [ "$(pid)" != 0 ] && kill -0 "$(pid)" 2>/dev/null; }
case "$verb" in
  show)
    for property in $(echo "$show" | tr , ' '); do
      case "$property" in
        ActiveState) value=$(active && echo active || echo inactive) ;;
        UnitFileState) value=$([ -e "$state/$unit.enabled" ] && echo enabled || echo disabled) ;;
        NeedDaemonReload) value=no ;;
        MainPID) value=$(pid) ;;
        *) value= ;;
      esac
      case " $* " in *" --value "*) echo "$value" ;; *) echo "$property=$value" ;; esac
    done ;;
  enable) touch "$state/$unit.enabled" ;;
  start|restart)
    active && kill "$(pid)"
    for folder in $(sed -n 's/^RuntimeDirectory=//p' "/etc/systemd/system/$unit"); do mkdir -p "/run/$folder"; done
    setsid sh -c "exec $(sed -n 's/^ExecStart=//p' "/etc/systemd/system/$unit")" </dev/null >"$state/$unit.log" 2>&1 &
    echo $! > "$state/$unit.pid" ;;
  reload) kill -HUP "$(pid)" ;;
  is-active) active ;;
esac
"""

# The login shell; sshd gives it -c and a command. When it replays, it runs a script of prefetched facts
# (tasks/common/prefetch.py) once, and then prints the same answers. The script is on standard input; its mark is always new.
_SHELL = r"""#!/bin/sh
[ -e /run/bench/replays ] && [ "$2" = "sh -c sh" ] || exec /bin/bash "$@"
script=$(cat)
mark=$(printf '%s\n' "$script" | sed -n "s/^printf .* \([0-9a-f]\{32\}\) .*/\1/p" | head -n 1)
answers=/run/bench/answers-$(printf '%s' "$script" | sed "s/$mark/MARK/" | sha256sum | cut -c 1-64)
if [ ! -e "$answers" ]; then
  printf '%s\n' "$script" | /bin/bash "$@" | sed "s/$mark/MARK/" > "$answers.$$"
  mv "$answers.$$" "$answers"
fi
exec sed "s/MARK/$mark/" "$answers"
"""

_SSHD_CONFIG = """
# sshd has room for 16 sockets: one for all addresses, and logins from this machine alone.
ListenAddress 0.0.0.0:{port}
AllowUsers root@127.0.0.0/8
HostKey /run/bench/host_key
AuthorizedKeysFile /run/bench/authorized_keys
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
UseDNS no
PrintMotd no
MaxStartups 500
MaxSessions 100
PidFile none
Subsystem sftp internal-sftp
LogLevel ERROR
"""


@frozen
class Fleet:
    """The simulated hosts: their addresses and port, and the files that a client needs."""

    addresses: tuple[str, ...]
    port: int
    key: Path
    known_hosts: Path

    def ssh(self, address: str, *command: str) -> list[str]:
        """The ssh command that runs one command on a host."""
        return [
            "ssh", "-F", "none", "-o", "BatchMode=yes", "-o", f"UserKnownHostsFile={self.known_hosts}",
            "-i", str(self.key), "-p", str(self.port), f"root@{address}", *command,
        ]  # fmt: skip

    def replay(self) -> None:
        """From now on read prefetched facts once, and let all hosts give these answers. The node must not change any more."""
        run(self.ssh(self.addresses[0], "touch", "/run/bench/replays"))


@contextmanager
def fleet(hosts: int, packages: Sequence[str]) -> Iterator[Fleet]:
    """Run the given number of hosts, with the given packages. Needs root."""
    with TemporaryDirectory(prefix="trackbed-bench-") as name:
        work = Path(name)
        for folder in ("root", "over", "node"):
            (work / folder).mkdir()
        made = _describe(work, hosts, packages)
        server = cached("sshd", (), _fetch)
        words = [
            "unshare",
            "--mount",
            "--pid",
            "--fork",
            "--kill-child",
            "sh",
            "-ec",
            _ENTER,
            "sh",
            str(work),
            str(server),
        ]
        log = (work / "log").open("w")
        with log, subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log) as node:
            try:
                _wait(made, node, work / "log")
                yield made
            finally:
                node.kill()


def _describe(work: Path, hosts: int, packages: Sequence[str]) -> Fleet:
    node = work / "node"
    for key in (work / "key", node / "host_key"):
        run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key])
    (work / "key.pub").rename(node / "authorized_keys")
    addresses = tuple(f"127.0.{1 + index // 250}.{1 + index % 250}" for index in range(hosts))
    port = free_port()
    public = (node / "host_key.pub").read_text().rsplit(" ", 1)[0]
    known_hosts = work / "known_hosts"
    known_hosts.write_text("".join(f"[{address}]:{port} {public}\n" for address in addresses))
    (node / "sshd_config").write_text(_SSHD_CONFIG.format(port=port))
    (node / "start").write_text(_START)
    (node / "systemctl").write_text(_SYSTEMCTL)
    (node / "shell").write_text(_SHELL)
    (node / "packages").write_text("\n".join(packages))
    return Fleet(addresses, port, work / "key", known_hosts)


def _fetch(folder: Path) -> None:
    with apt.throwaway(apt.host_sources()) as ours, TemporaryDirectory() as name:
        words = ["apt-get", *ours.options(), "-q", "download", *PACKAGES]
        subprocess.run(words, cwd=name, check=True, capture_output=True)
        for package in Path(name).glob("*.deb"):
            run(["dpkg-deb", "-x", package, folder])


def _wait(made: Fleet, node: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while subprocess.run(made.ssh(made.addresses[-1], "true"), capture_output=True, check=False).returncode:
        if node.poll() is not None or time.monotonic() > deadline:
            raise click.ClickException(f"the simulated fleet does not start; it needs root. {log.read_text().strip()}")
        time.sleep(0.1)
