"""`trackbed bundle`: the archive has no secret, and a part that hangs or fails does not stop the others."""

import json
import resource
import stat
import tarfile
import tempfile
from pathlib import Path

import pytest

from cli import support_bundle
from cli.support_bundle import REMOVED, Collector, collectors, redact, write

SECRET = "s3cr3t-value"  # noqa: S105  the test's own


@pytest.mark.parametrize(
    "text",
    [
        f"BOOT_IMAGE=/vmlinuz root=/dev/vda autoinstall.password={SECRET} quiet",
        f"cloud.token={SECRET},x=1",
        f"kubelet --bootstrap-token {SECRET} --v=2",
        f'{{"api_key": "{SECRET}", "a": 1}}',
        f'"client-secret" : "{SECRET} with spaces"',
        f"Authorization: Bearer {SECRET}",
        f"curl -H 'authorization: Basic {SECRET}'",
        f'{{"password": "one\\"{SECRET}", "a": 1}}',
        f"Authorization: Negotiate {SECRET}",
        f'Authorization: Digest username="x", response="{SECRET}"',
        f'{{"Authorization": "Bearer {SECRET}"}}',
        f"cloned https://{SECRET}@git.example.net/x",
        f"proxy http://user:{SECRET}@proxy.example.net:3128/",
        f"netroot=iscsi:user:{SECRET}@192.168.0.1::::iqn.2009-06.org.example:root quiet",
        f"AWS_SECRET_ACCESS_KEY={SECRET}",
        f"PASSWD='{SECRET}'",
        f"DB_PASS={SECRET} LANG=C",
        f"curl -u admin:{SECRET} https://registry.example.net",
        f"curl --user='admin:{SECRET}' https://registry.example.net",
        f"-----BEGIN RSA PRIVATE KEY-----\n{SECRET}\n-----END RSA PRIVATE KEY-----",
        f"-----BEGIN OPENSSH PRIVATE KEY-----\n{SECRET}\ncut off",
        f'{{"auths": {{"registry.example.net": {{"auth": "{SECRET}"}}}}}}',
        f"token: eyJhbGciOiJSUzI1NiJ9.{SECRET}",
        f"joined with eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJ4In0.{SECRET}",
    ],
)
def test_a_secret_is_removed(text: str) -> None:
    assert SECRET not in redact(text)
    assert REMOVED in redact(text)


def test_a_bootstrap_token_is_removed() -> None:
    assert redact("kubeadm join 10.0.0.1:6443 abcdef.0123456789abcdef") == f"kubeadm join 10.0.0.1:6443 {REMOVED}"


@pytest.mark.parametrize(
    "text",
    [
        "intel_iommu=on iommu=pt hugepages=64",
        "0000:3b:00.0 Ethernet controller [0200]: Mellanox [15b3:101d]",
        "mlx5_comp0@pci:0000:3b:00.0",
        "vf 2 trust on, spoofchk off, link/ether 02:00:5e:10:00:01",
        "http://192.168.0.1:8080/healthz",
        "ssh://root@192.168.0.1/",
        "netroot=iscsi:192.168.0.1::::iqn.2009-06.org.example:root quiet",
        "--authorization-mode=Node,RBAC",
        "spec cc03109e0180a0bd generation 3",
        "14 Nov 21 15:36:22 node1 trackbed[12]: key: value",
        "trackbed wait --first-pass --joined /etc/kubernetes/kubelet.conf",
        "ip netns exec -u root",
        # A search from each of the characters to the end would take hours.
        "a" * 1_000_000,
        "a." * 500_000,
    ],
)
def test_text_that_is_not_secret_stays(text: str) -> None:
    assert redact(text) == text


def content(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        parts = {}
        for entry in tar:
            file = tar.extractfile(entry)
            assert file is not None
            parts[entry.name.removeprefix("trackbed-bundle/")] = file.read().decode()
        return parts


@pytest.mark.slow  # the other programs must end in time, also on a busy machine
def test_the_archive_has_all_output_and_names_what_failed(tmp_path: Path) -> None:
    made = tmp_path / "bundle.tar.gz"
    failed = write(
        made,
        [
            Collector("good.txt", ("echo", f"fine password={SECRET}")),
            Collector("bad.txt", ("sh", "-c", "echo half; exit 3")),
            Collector("slow.txt", ("sh", "-c", "echo so far; exec sleep 600")),
            Collector("absent.txt", ("no-such-program",)),
            Collector("code.txt", ("sh", "-c", "exit 2"), frozenset({0, 2})),
        ],
        deadline=10.0,
    )
    parts = content(made)
    assert parts["good.txt"] == f"fine password={REMOVED}\n"
    assert (parts["bad.txt"], parts["slow.txt"], parts["code.txt"]) == ("half\n", "so far\n", "")
    assert "exit code 3" in failed["bad.txt"]
    assert "did not end within" in failed["slow.txt"]
    assert "No such file" in failed["absent.txt"]
    assert failed.keys() == {"bad.txt", "slow.txt", "absent.txt"}
    assert json.loads(parts["not-collected.json"]) == failed
    assert stat.S_IMODE(made.stat().st_mode) == 0o600


def test_parts_are_collected_where_no_file_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is full or read-only, and the archive is written elsewhere."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    made = tmp_path / "bundle.tar.gz"
    assert write(made, [Collector("good.txt", ("echo", "fine"))]) == {}
    assert content(made)["good.txt"] == "fine\n"


def test_an_archive_that_is_there_is_not_written_over(tmp_path: Path) -> None:
    made = tmp_path / "bundle.tar.gz"
    made.write_text("somebody's")
    with pytest.raises(FileExistsError):
        write(made, [])
    assert made.read_text() == "somebody's"


def test_an_archive_that_cannot_be_written_whole_is_removed(tmp_path: Path) -> None:
    """A file system that is full must not stay full because of it."""
    made = tmp_path / "bundle.tar.gz"
    noise = [Collector(f"{number}.txt", ("head", "-c", "40000", "/dev/urandom")) for number in range(4)]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            write(made, noise)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not made.exists()


def test_report_spec_and_history_are_collected_and_nothing_of_kubernetes(tmp_path: Path) -> None:
    for name in ("report.json", "history.jsonl", "history.jsonl.1", "apply.sock", "lock"):
        (tmp_path / name).write_text("")
    wanted = list(collectors(("trackbed",), (tmp_path,)))
    names = {collector.name for collector in wanted}
    assert {f"files{tmp_path}/{name}" for name in ("report.json", "history.jsonl", "history.jsonl.1")} <= names
    assert not any("lock" in name or "sock" in name for name in names if str(tmp_path) in name)
    assert not any("kubernetes" in word for collector in wanted for word in collector.command)
    assert all(sum(map(len, collector.command)) < 1 << 21 for collector in wanted)
    # grep without a file would read whatever it is started in.
    assert all(len(collector.command) > 3 for collector in wanted if collector.command[0] == "grep")


def test_attributes_below_links_are_collected_and_no_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = tmp_path / "devices/eth0/queues/rx-0"
    queue.mkdir(parents=True)
    for name in ("rps_cpus", "byte_queue_limits"):
        (queue / name).write_text(f"{name} of eth0\n")
    (tmp_path / "net").mkdir()
    (tmp_path / "net/eth0").symlink_to("../devices/eth0")
    monkeypatch.setattr(
        support_bundle, "ATTRIBUTES", (("steering.txt", f"{tmp_path}/net", "*/queues", ("rps_cpus", "xps_cpus")),)
    )
    made = tmp_path / "bundle.tar.gz"
    assert write(made, [one for one in collectors((), ()) if one.name == "steering.txt"]) == {}
    assert content(made)["steering.txt"] == f"{tmp_path}/net/eth0/queues/rx-0/rps_cpus:rps_cpus of eth0\n"
