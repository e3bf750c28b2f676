"""Runs the servers and clients of one round of the fabric's test on this node.

Standard input is a JSON object with `do` (serve, measure, collect) and `jobs`. Each job has `id`, `argv`, `port`, `seconds` and
`rdma_cm`. `ends` says that the server will end by itself. `files` has contents of files by their names. They are written to a
folder, whose path replaces @FILES@ in `argv` and in the files; `collect` deletes it. The last line of standard output is a JSON
object with an answer for each `id`.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

FOLDER = Path(os.environ.get("TRACKBED_FABRIC", "/run/trackbed-fabric"))
START = 15.0
"""Seconds within which a server must listen."""

UP = 2.0
"""Seconds after which a server that runs counts as listening if its port does not show that: the kernel does not list the ports
of the RDMA connection manager, and another program may listen on the same port."""

KILLED = 10.0
"""Seconds that a killed program may take to end: the kernel may hold it while it waits for the peer's answers."""

END = 10.0
"""Seconds for a server to end after its client."""

TIMED_OUT = 124
"""The exit status of timeout(1) for a program that it has stopped."""

LONGEST = 8000
"""The most characters of a program's output that are sent: the last ones."""

# A shell script that writes a program's exit status to a file, since this process does not wait for the program.
KEEP = 'file=$1; shift; code=0; "$@" || code=$?; echo "$code" > "$file.new"; mv "$file.new" "$file"'


def main() -> None:
    """Do what standard input asks for."""
    asked = json.load(sys.stdin)
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    print(json.dumps({"serve": serve, "measure": measure, "collect": collect}[asked["do"]](asked["jobs"])))  # noqa: T201


def serve(jobs: list[dict[str, Any]]) -> dict[str, str]:
    """Start servers. The answer for each is why it does not listen, or an empty text."""
    # A stopped run may have left servers. Each has its port until it has ended.
    left = {job["port"] for job in jobs if stop(job)}
    end = time.monotonic() + KILLED
    while left & listening() and time.monotonic() < end:
        time.sleep(0.05)
    taken = listening()
    for job in jobs:
        files = _files(job)
        for file in files:
            file.unlink(missing_ok=True)
        prepare(job)
        code, log, pid = files
        with log.open("w") as output:
            try:
                words = ["sh", "-c", KEEP, "sh", str(code), *_limited(job)]
                process = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
                pid.write_text(str(process.pid))
            except OSError as error:
                code.write_text("127\n")
                output.write(str(error))
    began = time.monotonic()
    answers = {}
    while len(answers) < len(jobs):
        waited = time.monotonic() - began
        ports = listening()
        for job in jobs:
            code, log, _ = _files(job)
            if job["id"] in answers:
                continue
            if code.exists():
                answers[job["id"]] = f"exit status {code.read_text().strip()}: {_printed(log)}"
            elif waited > UP if job["rdma_cm"] or job["port"] in taken else job["port"] in ports:
                answers[job["id"]] = ""
            elif waited > START:
                answers[job["id"]] = f"it does not listen after {START:.0f} s: {_printed(log)}"
        time.sleep(0.05)
    return answers


def measure(jobs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Run clients at the same time. The answer for each is its exit status and output."""
    running = {}
    answers = {}
    for job in jobs:
        prepare(job)
        try:
            running[job["id"]] = subprocess.Popen(
                _limited(job),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                errors="replace",
            )
        except OSError as error:
            answers[job["id"]] = [127, str(error)]
    end = time.monotonic() + max((job["seconds"] for job in jobs), default=0) + KILLED
    for name, process in running.items():
        try:
            # At least a second, so that the output of a client that has ended is read, too.
            output = process.communicate(timeout=max(1.0, end - time.monotonic()))[0]
            answers[name] = [process.returncode, output[-LONGEST:]]
        except subprocess.TimeoutExpired:
            answers[name] = [TIMED_OUT, "it has not ended although its time is over"]
    return answers


def collect(jobs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """End the servers. The answer for each is its exit status and output; the status is null if it had to be stopped."""
    end = time.monotonic() + END
    # If its client has failed, a server may wait for it for ever.
    while any(job["ends"] and not _files(job)[0].exists() for job in jobs) and time.monotonic() < end:
        time.sleep(0.05)
    answers = {}
    for job in jobs:
        code, log, _ = _files(job)
        status = int(code.read_text()) if code.exists() else None
        stop(job)
        shutil.rmtree(_folder(job), ignore_errors=True)
        answers[job["id"]] = [status, _printed(log) if log.exists() else ""]
    return answers


def prepare(job: dict[str, Any]) -> None:
    """Write the files of a job, which nobody else may read."""
    folder = _folder(job)
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in job.get("files", {}).items():
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / name
        path.touch(mode=0o600)
        path.write_text(text.replace("@FILES@", str(folder)))


def stop(job: dict[str, Any]) -> bool:
    """Stop a server that still runs, with all that it started. Return whether there was one."""
    pid = _files(job)[2]
    stopped = False
    if pid.exists():
        # Another program may have this process ID by now. Ours has the path of the file in its command line.
        number = int(pid.read_text())
        try:
            words = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
            if str(_files(job)[0]).encode() in words:
                os.killpg(number, 9)
                stopped = True
        except OSError:
            pass
        pid.unlink()
    return stopped


def listening() -> set[int]:
    """The TCP ports on which a program listens (/proc/net/tcp, state 0A: proc_net_tcp.rst)."""
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            rows = [line.split() for line in Path(table).read_text().splitlines()[1:]]
        except OSError:
            continue
        ports |= {int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A"}
    return ports


def _limited(job: dict[str, Any]) -> list[str]:
    # timeout(1) makes a process group of its own, which stop() would not reach.
    words = [word.replace("@FILES@", str(_folder(job))) for word in job["argv"]]
    return ["timeout", "--foreground", "-k", "2", str(job["seconds"]), *words]


def _printed(log: Path) -> str:
    return log.read_text(errors="replace")[-LONGEST:]


def _files(job: dict[str, Any]) -> tuple[Path, Path, Path]:
    name = str(int(job["port"]))
    return FOLDER / f"{name}.code", FOLDER / f"{name}.log", FOLDER / f"{name}.pid"


def _folder(job: dict[str, Any]) -> Path:
    return FOLDER / f"{int(job['port'])}.files"


if __name__ == "__main__":
    main()
