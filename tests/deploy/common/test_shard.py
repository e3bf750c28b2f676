"""Shards, through pyinfra's own command line and the project's config.py."""

import re
import subprocess
from pathlib import Path

import pytest
from pyinfra.api.exceptions import PyinfraError

from tasks.common.shard import part
from tests.deploy.fake import deployed

DEPLOY = 'from pyinfra.operations import server\nserver.shell(commands=["true"])\n'


def pyinfra(folder: Path, shard: str, *options: str) -> subprocess.CompletedProcess[str]:
    return deployed(folder, {f"h{number:02}": {} for number in range(5)}, DEPLOY, *options, TRACKBED_SHARD=shard)


def connected(done: subprocess.CompletedProcess[str]) -> set[str]:
    assert done.returncode == 0, done.stderr
    return set(re.findall(r"\[@fake/(h\d+)\] Connected", done.stderr))


def test_all_shards_together_are_the_inventory(tmp_path: Path) -> None:
    assert connected(pyinfra(tmp_path, "1/2")) == {"h00", "h02", "h04"}
    assert connected(pyinfra(tmp_path, "2/2")) == {"h01", "h03"}
    assert connected(pyinfra(tmp_path, "")) == {"h00", "h01", "h02", "h03", "h04"}
    assert connected(pyinfra(tmp_path, "7/9")) == set()


def test_a_shard_is_a_part_of_what_the_limit_leaves(tmp_path: Path) -> None:
    assert connected(pyinfra(tmp_path, "2/2", "--limit", "@fake/h0[0-2]", "--exclude", "@fake/h01")) == {"h02"}


def test_an_invalid_shard_stops_before_a_host_is_changed(tmp_path: Path) -> None:
    done = pyinfra(tmp_path, "17/16")
    assert done.returncode != 0
    assert "TRACKBED_SHARD='17/16' is not a shard" in done.stderr
    assert "Traceback" not in done.stderr and "Connected" not in done.stderr


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "3/", "-1/2", "1/2/3", "1/0", "one/two", " 1/2", "1/2\n"])
def test_a_text_that_is_not_a_shard_is_refused(text: str) -> None:
    with pytest.raises(PyinfraError, match="is not a shard"):
        part(text, [])


def test_every_host_is_in_one_shard() -> None:
    hosts = [f"gpu-{n}" for n in range(37)]
    shares = [part(f"{number}/16", hosts) for number in range(1, 17)]
    assert sorted(host for share in shares for host in share) == sorted(hosts)
    assert {len(share) for share in shares} == {2, 3}
    assert part("3/16", hosts[::-1]) == shares[2]
