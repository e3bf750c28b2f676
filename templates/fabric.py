"""Runs the servers and clients of one round of the fabric's test on this node.

Standard input is a JSON object: `do` (serve, measure, collect) and `jobs`, each with `id`, `argv`, `port`, `seconds` and
`rdma_cm`; `ends`: the server will end by itself; `files`: by name, the content of files, in whose folder's place `argv` and the
files have @FILES@. They are deleted by `collect`. The answer, a JSON object by `id`, is the last line of standard output.
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
"""Seconds for a server to listen."""

UP = 2.0
"""Seconds after which a server of the RDMA connection manager is taken to listen: the kernel shows its port to nobody."""

KILLED = 10.0
"""Seconds for a client to be gone after its time is over: the kernel may hold it while it waits for the peer's answers."""

END = 10.0
"""Seconds for a server to end after its client."""

TIMED_OUT = 124
"""The exit status of timeout(1) for a program that it has stopped."""

LONGEST = 8000
"""Characters of a program's output that are sent, the last ones."""

# Keeps the exit status after this program has ended.
KEEP = 'file=$1; shift; code=0; "$@" || code=$?; echo "$code" > "$file.new"; mv "$file.new" "$file"'


def main() -> None:
    """Do what standard input asks for."""
    asked = json.load(sys.stdin)
    FOLDER.mkdir(mode=0o700, exist_ok=True)
    print(json.dumps({"serve": serve, "measure": measure, "collect": collect}[asked["do"]](asked["jobs"])))  # noqa: T201


def serve(jobs: list[dict[str, Any]]) -> dict[str, str]:
    """Start servers, and say of each why it does not listen; an empty text if it does."""
    for job in jobs:
        files = _files(job)
        stop(job)
        for file in files:
            file.unlink(missing_ok=True)
        prepare(job)
        code, log, pid = files
        with log.open("w") as output:
            try:
                words = ["sh", "-c", KEEP, "sh", str(code), *_limited(job)]
                made = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
                )
                pid.write_text(str(made.pid))
            except OSError as error:
                code.write_text("127\n")
                output.write(str(error))
    began = time.monotonic()
    said = {}
    while len(said) < len(jobs):
        waited = time.monotonic() - began
        heard = listening()
        for job in jobs:
            code, log, _ = _files(job)
            if job["id"] in said:
                continue
            if code.exists():
                said[job["id"]] = f"exit status {code.read_text().strip()}: {log.read_text()[-LONGEST:]}"
            elif job["port"] in heard or (job["rdma_cm"] and waited > UP):
                said[job["id"]] = ""
            elif waited > START:
                said[job["id"]] = f"it does not listen after {START:.0f} s: {log.read_text()[-LONGEST:]}"
        time.sleep(0.05)
    return said


def measure(jobs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Run clients at the same time; the exit status and the output of each."""
    running = {}
    said = {}
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
            said[job["id"]] = [127, str(error)]
    end = time.monotonic() + max((job["seconds"] for job in jobs), default=0) + KILLED
    for name, process in running.items():
        try:
            # Also the output of one that ended long ago must be read.
            output = process.communicate(timeout=max(1.0, end - time.monotonic()))[0]
            said[name] = [process.returncode, output[-LONGEST:]]
        except subprocess.TimeoutExpired:
            said[name] = [TIMED_OUT, "it has not ended although its time is over"]
    return said


def collect(jobs: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """End the servers; the exit status and the output of each. The status is null if it had to be stopped."""
    end = time.monotonic() + END
    # The server of a client that has failed may wait for that client for ever.
    while any(job["ends"] and not _files(job)[0].exists() for job in jobs) and time.monotonic() < end:
        time.sleep(0.05)
    said = {}
    for job in jobs:
        code, log, _ = _files(job)
        status = int(code.read_text()) if code.exists() else None
        stop(job)
        shutil.rmtree(_folder(job), ignore_errors=True)
        said[job["id"]] = [status, log.read_text(errors="replace")[-LONGEST:] if log.exists() else ""]
    return said


def prepare(job: dict[str, Any]) -> None:
    """Write the files of a job, which nobody else may read."""
    folder = _folder(job)
    shutil.rmtree(folder, ignore_errors=True)
    for name, text in job.get("files", {}).items():
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / name
        path.touch(mode=0o600)
        path.write_text(text.replace("@FILES@", str(folder)))


def stop(job: dict[str, Any]) -> None:
    """Stop a server that still runs, with all that it started."""
    pid = _files(job)[2]
    if pid.exists():
        # The session's number may belong to somebody else by now: a program of ours has the file's path in its words.
        number = int(pid.read_text())
        try:
            words = Path(f"/proc/{number}/cmdline").read_bytes().split(b"\0")
            if str(_files(job)[0]).encode() in words:
                os.killpg(number, 9)
        except OSError:
            pass
        pid.unlink()


def listening() -> set[int]:
    """The TCP ports on which something listens, by /proc/net/tcp (state 0A, proc_net_tcp.rst)."""
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


def _files(job: dict[str, Any]) -> tuple[Path, Path, Path]:
    name = str(int(job["port"]))
    return FOLDER / f"{name}.code", FOLDER / f"{name}.log", FOLDER / f"{name}.pid"


def _folder(job: dict[str, Any]) -> Path:
    return FOLDER / f"{int(job['port'])}.files"


if __name__ == "__main__":
    main()
