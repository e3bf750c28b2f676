"""Measures a deploy that has nothing to do: `python -m bench.deploy`.

On one host it is compared with a bare ssh that runs `true`; on many hosts with an Ansible playbook that does the same. Both
run on a simulated fleet on this machine (bench/simulated_fleet.py), so both times include the nodes' work. A last deploy, if
the fleet is not divided into shards, has hosts beside them that accept a connection and then say nothing.
"""

from __future__ import annotations

import json
import os
import re
import resource
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from agent.report import names
from bench.simulated_fleet import Fleet, fleet
from lab.command import run
from lab.instance import free_port
from lab.repository import cached
from tasks.common import archive
from tasks.common.shard import VARIABLE, part
from tasks.packages import BASE

ANSIBLE = "ansible-core==2.19.14"
PLAYBOOK = Path(__file__).with_name("playbook.yml")
FILES = (
    names.SPEC_FILE,
    "/usr/local/bin/trackbed",
    "/etc/systemd/system/trackbed.service",
    "/etc/systemd/system/trackbed-reporter.service",
)


def seconds(command: Sequence[str], **environment: str) -> tuple[float, str]:
    """The seconds that a command takes, and its output. A failure ends the benchmark."""
    began = time.monotonic()
    done = subprocess.run(
        command,
        cwd=archive.ROOT,
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    took = time.monotonic() - began
    if done.returncode:
        raise click.ClickException(f"{' '.join(command[:6])} ... failed: {(done.stdout + done.stderr).strip()[-2000:]}")
    return took, done.stdout


def inventory(hosts: Fleet, folder: Path, listen: int, silent: Sequence[int] = ()) -> Path:
    """pyinfra's inventory of the fleet. All hosts are one node, so they have one name.

    :param listen: the port of the reporter on the node.
    :param silent: ports of this machine on which hosts that never answer are to be added.
    """
    data = {
        "ssh_port": hosts.port,
        "ssh_user": "root",
        "ssh_key": str(hosts.key),
        "ssh_known_hosts_file": str(hosts.known_hosts),
        "ssh_strict_host_key_checking": "yes",
        "node_name": "simulated",
        # This machine's kernel may lack the modules, which does not matter here.
        "kernel_modules": [],
        "reporter_listen": f"127.0.0.1:{listen}",
    }
    all_hosts = [(address, data) for address in hosts.addresses]
    all_hosts += [(f"silent{port}", {**data, "ssh_hostname": "127.0.0.1", "ssh_port": port}) for port in silent]
    file = folder / ("silent.py" if silent else "simulated.py")
    file.write_text(f"hosts = {all_hosts!r}\n")
    return file


def deploy(file: Path, addresses: Sequence[str], first: bool = False, shards: int = 1) -> float:
    """Seconds of a deploy of the first hosts, in so many shards at once. It must change nothing, unless it is their first."""
    limits = [word for address in addresses for word in ("--limit", address)]
    command = [sys.executable, "-m", "pyinfra", "-y", "--json", str(file), "deploy.py", *limits]
    parts = [f"{number}/{shards}" for number in range(1, shards + 1)]
    began = time.monotonic()
    with ThreadPoolExecutor(shards) as pool:
        printed = list(pool.map(lambda shard: seconds(command, **{VARIABLE: shard})[1], parts))
    took = time.monotonic() - began
    for shard, text in zip(parts, printed, strict=True):
        changed = _changed(json.loads(text)["results"]["operations"], len(part(shard, list(addresses))))
        if changed and not first:
            raise click.ClickException(f"the deploy changed something: {', '.join(changed)}")
    return took


def _changed(operations: Sequence[dict[str, Any]], hosts: int) -> list[str]:
    return [one["name"] for one in operations if len(one["no_change"]) != hosts]


def with_silent(hosts: Fleet, folder: Path, listen: int, count: int) -> float:
    """Seconds of a deploy of all hosts, and of so many beside them that never answer. Only these may fail."""
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        file = inventory(hosts, folder, listen, [each.getsockname()[1] for each in sockets])
        command = [sys.executable, "-m", "pyinfra", "-y", "--json", str(file), "deploy.py"]
        began = time.monotonic()
        done = subprocess.run(
            command, cwd=archive.ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        took = time.monotonic() - began
    results = (
        json.loads(done.stdout)["results"] if done.stdout.startswith("{") else {"operations": [], "failed_hosts": []}
    )
    changed = _changed(results["operations"], len(hosts.addresses))
    if changed or len(results["failed_hosts"]) != count:
        raise click.ClickException(
            f"hosts that answer changed or failed: {changed}, {results['failed_hosts']}: {done.stderr.strip()[-2000:]}"
        )
    return took


def ansible(hosts: Fleet, folder: Path) -> list[str]:
    """The command that runs the playbook on all hosts, with all settings that make Ansible fast."""
    inventory = folder / "hosts"
    inventory.write_text("".join(f"{address}\n" for address in hosts.addresses))
    contents = {file: seconds(hosts.ssh(hosts.addresses[0], "cat", file))[1] for file in FILES}
    version = seconds(hosts.ssh(hosts.addresses[0], "basename $(readlink /opt/trackbed/current)"))[1].strip()
    settings = {
        "ansible_user": "root",
        "ansible_port": hosts.port,
        "ansible_ssh_private_key_file": str(hosts.key),
        "ansible_python_interpreter": "/usr/bin/python3",
        "ansible_ssh_common_args": f"-F none -o UserKnownHostsFile={hosts.known_hosts}",
        "packages": BASE["debian"],
        "files": contents,
        "version": version,
    }
    values = folder / "values.json"
    values.write_text(json.dumps(settings))
    words = ["-i", str(inventory), "-e", f"@{values}", "-f", str(len(hosts.addresses)), str(PLAYBOOK)]
    return [sys.executable, "-m", "ansible.cli.playbook", *words]


def play(command: Sequence[str], folder: Path) -> float:
    """Seconds of the playbook, which must change nothing."""
    took, printed = seconds(
        command,
        PYTHONPATH=str(cached("ansible", (ANSIBLE.encode(),), _install)),
        ANSIBLE_PIPELINING="1",
        ANSIBLE_LOCAL_TEMP=str(folder / "ansible"),
        ANSIBLE_HOME=str(folder / "ansible"),
    )
    recap = printed.rpartition("PLAY RECAP")[2]
    if not re.search(r"changed=0", recap) or re.search(r"changed=[1-9]", recap):
        raise click.ClickException(f"the playbook changed something: {recap}")
    return took


def _install(folder: Path) -> None:
    run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            f"--target={folder}",
            ANSIBLE,
        ]
    )


@click.command()
@click.option("--hosts", default=50, show_default=True, help="Hosts of the fleet.")
@click.option("--shards", default=1, show_default=True, help="Shards that the deploy of all hosts is divided into.")
@click.option("--rounds", default=5, show_default=True, help="Deploys of one host, each beside a bare ssh.")
@click.option("--playbook/--no-playbook", default=True, help="Also run the playbook, which takes 8 s a host.")
@click.option(
    "--replay",
    is_flag=True,
    help="Read the facts once, and let all hosts give these answers, to measure the control host alone.",
)
def main(hosts: int, shards: int, rounds: int, playbook: bool, replay: bool) -> None:
    """Print the seconds of an unchanged deploy, beside those of a bare ssh and of a playbook."""
    with TemporaryDirectory(prefix="trackbed-bench-") as name, fleet(hosts, BASE["debian"]) as simulated:
        folder = Path(name)
        listen = free_port()
        file = inventory(simulated, folder, listen)
        one = simulated.addresses[:1]
        deploy(file, one, first=True)
        deploy(file, one)
        if replay:
            simulated.replay()
        deploys, execs = [], []
        begun = used_s()
        for _ in range(rounds):
            execs.append(seconds(simulated.ssh(one[0], "true"))[0])
            deploys.append(deploy(file, one))
        one_cpu = (used_s() - begun) / rounds
        deploy(file, simulated.addresses, shards=shards)
        begun = used_s()
        many = deploy(file, simulated.addresses, shards=shards)
        many_cpu = used_s() - begun
        bad = -(-hosts // 100)
        spoilt = with_silent(simulated, folder, listen, bad) if shards == 1 else None
        played = play(ansible(simulated, folder), folder) if playbook else None
    table = Table("hosts", "the deploy", "counterpart", "ratio", title="a deploy that finds nothing to do")
    deployed, bare = statistics.median(deploys), statistics.median(execs)
    table.add_row("1", f"{deployed:.2f} s", f"{bare:.2f} s, a bare ssh", f"{deployed / bare:.1f}")
    beside = ("", "") if played is None else (f"{played:.1f} s, an Ansible playbook", f"1/{played / many:.1f}")
    divided = f"{hosts} in {shards} shards" if shards > 1 else str(hosts)
    table.add_row(divided, f"{many:.1f} s", *beside)
    if spoilt is not None:
        table.add_row(f"{hosts}, and {bad} silent", f"{spoilt:.1f} s", "", "")
    others = max(1, hosts - 1)
    console = Console(width=100)
    console.print(table)
    console.print(
        f"each further host: {(many - deployed) / others:.2f} s; CPU time of the control host: {one_cpu:.2f} s for one host, "
        f"{(many_cpu - one_cpu) / others:.3f} s for each further one; most memory of one process: {memory_mib():.0f} MiB"
    )


def used_s() -> float:
    """CPU seconds of all processes that this one has waited for. Other programs on this machine hardly change them."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def memory_mib() -> float:
    """The most memory of a process that this one has waited for."""
    return resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024


if __name__ == "__main__":
    main()
