"""A site of one's own, outside of the checkout, as an operator makes and deploys it."""

import json
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from pyinfra.api.exceptions import DeployError

from agent.runtime import version
from fleet.api import Failed
from fleet.inventory import Inventory
from tasks import pull
from tasks.common import site as site_file
from tasks.common.archive import ROOT
from tasks.common.site import PIN
from tests.deploy.fake import IMPORT
from tests.deploy.test_cli import FRESH
from tests.programs import failure, success
from tests.stand_ins import text_file

PYINFRA = str(Path(sys.executable).with_name("pyinfra"))
FAKE = {"fake_responses": FRESH}
NICS = 'nics = [{"name": "rail0", "select": {"pci": "0000:18:00.0"}, "vfs": {"count": 8}}]\n'


def ran(*words: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in words], cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def dry(site: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return ran(PYINFRA, site / "inventories/prod.py", "deploy.py", "--dry", *options)


def trackbed(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return ran(Path(sys.executable).with_name("trackbed"), *words)


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A site as `trackbed init` makes it, with two servers."""
    folder = tmp_path / "fleet"
    success(trackbed("init", folder))
    hosts = [(f"@fake/gpu-0{number}", {"node_name": f"gpu-0{number}"}) for number in (1, 2)]
    (folder / "inventories/prod.py").write_text(f"{IMPORT}servers = ({hosts!r}, {FAKE!r})\n")
    (folder / "group_data/servers.py").write_text(NICS)
    return folder


def data_of(inventory: Path) -> list[dict[str, Any]]:
    return [host["data"] for host in json.loads(success(ran(PYINFRA, "--json", inventory, "debug-inventory")))]


def test_an_inventory_of_three_lines_is_deployed_dry(site: Path) -> None:
    done = dry(site)
    assert done.returncode == 0, done.stderr
    assert "Spec | Plan and write" in done.stderr
    assert "plan: beside the NICs: irqbalance" in done.stderr
    assert [each["nics"][0]["vfs"] for each in data_of(site / "inventories/prod.py")] == [{"count": 8}, {"count": 8}]


def test_init_leaves_what_is_there_and_refuses_the_checkout(site: Path) -> None:
    (site / "README.md").write_text("ours\n")
    assert "README.md exists, and stays as it is" in trackbed("init", site).stdout
    assert (site / "README.md").read_text() == "ours\n"
    assert f"{ROOT}/fleet-of-mine is in the checkout" in failure(trackbed("init", ROOT / "fleet-of-mine"))
    assert not (ROOT / "fleet-of-mine").exists()


def test_init_writes_the_folder_s_name_in_each_locale(tmp_path: Path) -> None:
    ascii_only = ("env", "LC_ALL=C", "PYTHONUTF8=0", "PYTHONCOERCECLOCALE=0")
    done = ran(*ascii_only, Path(sys.executable).with_name("trackbed"), "init", tmp_path / "fl\u00f6et")
    assert done.returncode == 0, done.stderr
    assert f"{tmp_path}/fl\u00f6et" in (tmp_path / "fl\u00f6et/README.md").read_text()


@pytest.mark.parametrize("inventory", ["inventories/prod.py", "prod.py", "inventories/eu/prod.py"])
def test_the_data_of_the_examples_never_reach_a_site(site: Path, inventory: str) -> None:
    # Groups of the examples, one with data of the site and one without.
    text = "connectx_roce = ['@fake/a']\nbare_metal_sriov = ['@fake/a']\n"
    text_file(site / inventory, text)
    (site / "group_data/bare_metal_sriov.py").write_text("site_rack = 7\n")
    assert data_of(site / inventory) == [{"site_rack": 7}]


def test_an_inventory_imports_a_module_of_its_site(site: Path) -> None:
    (site / "racks.py").write_text("RACK = 7\n")
    (site / "inventories/prod.py").write_text("import racks\nservers = [('@fake/a', {'site_rack': racks.RACK})]\n")
    assert data_of(site / "inventories/prod.py")[0]["site_rack"] == 7


def test_relative_paths_begin_at_the_site(site: Path) -> None:
    keyring = {"url": "https://example.net/t", "keyring": "keys/fleet.gpg", "inventory": "inventories/prod.py"}
    with (site / "group_data/servers.py").open("a") as file:
        file.write(f"pull = {keyring}\n")
    done = dry(site)
    assert f"{site}/keys/fleet.gpg is not a file" in done.stderr


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        ("inventories/prod.py", b"servers = [", "prod.py:1: SyntaxError: '[' was never closed (the file is read as"),
        (
            "inventories/prod.py",
            b"servers = true",
            "prod.py:1: NameError: name 'true' is not defined (the file is read as",
        ),
        ("group_data/servers.py", b"\nimport no_such\n", "servers.py:2: ModuleNotFoundError: No module named 'no_"),
        ("group_data/servers.py", b"site_name = '\xff'", "servers.py: UnicodeDecodeError: "),
        ("racks.py", b"\nRACK = 1 / 0\n", "racks.py:2: ZeroDivisionError: division by zero"),
        ("inventories/prod.py", b"raise SystemExit", "prod.py:1: SystemExit: "),
    ],
)
def test_a_file_of_the_site_that_python_refuses_is_one_error(site: Path, file: str, content: bytes, said: str) -> None:
    (site / "inventories/prod.py").write_text("import racks\nservers = ['@fake/a']\n")
    (site / "racks.py").touch()
    (site / file).write_bytes(content)
    inventory = site / "inventories/prod.py"
    for done in (dry(site), trackbed("explain", "@fake/a", "--inventory", inventory)):
        assert done.returncode == 1
        assert said in done.stderr and done.stderr.rstrip().endswith("; correct the file")
        assert "Traceback" not in done.stderr and "report" not in done.stderr


def test_group_data_of_a_mistyped_name_are_named(site: Path) -> None:
    inventory = site / "inventories/prod.py"
    for name in ("server", "storage"):
        (site / f"group_data/{name}.py").write_text("site_rack = 7\n")
    said = f"{site}/group_data/server.py is of no group of this inventory; did you mean servers.py?"
    assert said not in ran(PYINFRA, inventory, "debug-inventory").stderr
    (site / "group_data/servers.py").unlink()
    (site / "group_data/all.yml").write_text("site_rack: 7\n")
    done = ran(PYINFRA, inventory, "debug-inventory")
    assert said in done.stderr and "storage.py" not in done.stderr
    assert f"{site}/group_data/all.yml is not read" in done.stderr


def test_what_may_be_meant_for_data_and_is_not_read_is_named(site: Path) -> None:
    inventory = site / "inventories/prod.py"
    for name in ("host_data", "group_data/servers", "group_data/shared"):
        (site / name).mkdir()
    inventory.write_text(f"{inventory.read_text()}NICS = []\ncanary = []\n")
    said = ran(PYINFRA, inventory, "debug-inventory").stderr
    assert f"{site}/host_data is not read" in said
    assert f"{site}/group_data/servers is not read" in said
    assert "NICS is a group" in said and "the key 'nics'?" in said
    assert "shared" not in said and "canary" not in said


def test_a_host_with_two_values_of_a_key_in_two_groups_is_named_with_the_one_that_counts(site: Path) -> None:
    inventory = site / "inventories/prod.py"
    inventory.write_text(
        "a = [('@fake/a', {'node_number': 1, 'site_x': 3})]\nb = [('@fake/a', {'node_number': 2, 'site_x': 3})]\n"
    )
    said = ran(PYINFRA, inventory, "debug-inventory").stderr
    assert "@fake/a has a node_number in a and another in b, which counts; give it once" in said
    assert "has a site_x" not in said
    assert data_of(inventory)[0]["node_number"] == 2


@pytest.mark.parametrize("deploy", ["deploy.py", f"{ROOT}/deploys/remove.py"])
def test_a_deploy_in_the_place_of_the_inventory_is_one_error(site: Path, deploy: str) -> None:
    assert f"{deploy} is no inventory" in failure(ran(PYINFRA, deploy, site / "inventories/prod.py", "--dry"))


@pytest.mark.parametrize("given", ["", "inventories"])
def test_a_folder_in_the_place_of_an_inventory_is_named_with_an_inventory(site: Path, given: str) -> None:
    said = failure(ran(PYINFRA, site / given, "deploy.py", "--dry"))
    assert f"{site / given} is a folder; " in said and f" such as {site}/inventories/prod.py" in said


@pytest.mark.parametrize(
    ("content", "pinned"),
    [(b"\n", None), (b"1.0\r\n# ours\n", "1.0"), (b"\xef\xbb\xbf1.0\n", "1.0"), (b"\xff", "\\xff")],
)
def test_the_version_of_a_site_is_the_first_word_of_its_file(
    tmp_path: Path, content: bytes, pinned: str | None
) -> None:
    (tmp_path / PIN).write_bytes(content)
    assert site_file.pinned(tmp_path) == pinned


def test_the_commands_that_init_shows_are_quoted(tmp_path: Path) -> None:
    trackbed("init", tmp_path / "my fleet")
    shown = (tmp_path / "my fleet/README.md").read_text()
    assert f"pyinfra '{tmp_path}/my fleet'/inventories/prod.py deploy.py\n" in shown


def test_another_version_than_the_site_is_for_shows_and_does_not_deploy(site: Path) -> None:
    (site / PIN).write_text("0.9.0\n")
    shown = dry(site)
    assert shown.returncode == 0, shown.stderr
    said = f"says that this site is for Trackbed 0.9.0, and this checkout is {version()}"
    assert said in shown.stderr
    assert f"{ROOT}/CHANGELOG.md" in shown.stderr
    refused = failure(ran(PYINFRA, "-y", site / "inventories/prod.py", "deploy.py"))
    assert said in refused
    assert "Connecting" not in refused
    with pytest.raises(DeployError, match=r"for Trackbed 0\.9\.0"):
        pull.build(site / "archive", (), site)
    (site / PIN).write_text(f"{version()}\n")
    assert said not in dry(site).stderr


def test_the_archive_of_pull_mode_has_the_site_in_the_place_of_the_examples(site: Path) -> None:
    (site / "racks.py").write_text("RACK = 7\n")
    (site / "deploy.py").write_text("raise SystemExit\n")
    (site / "kubeconfig").write_text("secret\n")
    text_file(site / "rooms/__init__.py")
    # A lock of Emacs, and Vim's copy of what is edited.
    (site / "group_data/.#servers.py").symlink_to("user@host.1:2")
    (site / "inventories/.prod.py.swp").touch()
    (site / ".#racks.py").symlink_to("user@host.1:2")
    pull.build(site / "archive", (), site)
    with tarfile.open(site / "archive") as tar:
        parts = ("inventories/", "group_data/", "rooms/")
        names = {name for name in tar.getnames() if name.startswith(parts) or "/" not in name}
        assert {tar.extractfile("deploy.py").read(), tar.extractfile("inventories/prod.py").read()} == {  # type: ignore[union-attr]
            (ROOT / "deploy.py").read_bytes(),
            (site / "inventories/prod.py").read_bytes(),
        }
    assert names - set(pull.CONTENT) == {
        *("ISSUED", "cache", "inventories", "inventories/prod.py", "inventories/local.py"),
        *("group_data", "group_data/servers.py", "racks.py", "rooms", "rooms/__init__.py"),
    }
    (site / "group_data/old.py").symlink_to("nowhere")
    with pytest.raises(DeployError, match=r"group_data/old\.py cannot be packed: .*; remove or mend that file"):
        pull.build(site / "archive", (), site)
    (site / "group_data/old.py").unlink()
    (site / "inventories/local.py").write_text("")
    with pytest.raises(DeployError, match=r"inventories/local\.py: the archive has another file of this name; rename"):
        pull.build(site / "archive", (), site)


def test_pyinfra_of_another_checkout_is_one_error(tmp_path: Path, site: Path) -> None:
    for name in ("config.py", "deploy.py"):
        shutil.copy(ROOT / name, tmp_path)
    message = failure(ran(PYINFRA, site / "inventories/prod.py", "deploy.py", "--dry", cwd=tmp_path))
    said = f"this pyinfra belongs to the checkout {ROOT}, and runs in {tmp_path}: run `make control` in {tmp_path}"
    assert said in message
    assert "Traceback" not in message and "Connecting" not in message


def test_pyinfra_in_the_site_s_folder_is_one_error(site: Path) -> None:
    # The fake hosts are of this checkout, which is not on the path there.
    path = f"import sys\nsys.path.append({str(ROOT)!r})\n"
    inventory = site / "inventories/prod.py"
    inventory.write_text(path + inventory.read_text())
    said = failure(ran(PYINFRA, "inventories/prod.py", ROOT / "deploy.py", "--dry", cwd=site))
    assert f"pyinfra has not read {ROOT}/config.py: run it in {ROOT}" in said


def explained(site: Path, *words: str) -> list[str]:
    shown = success(trackbed("explain", *words, "--inventory", site / "inventories/prod.py"))
    return shown.replace(f"{site}/", "").splitlines()


def test_an_override_reaches_the_deploy_and_one_of_another_host_does_not_stop_it(site: Path) -> None:
    odd = {"node_name": "a", "nic_overrides": {"rail0": {"select": {"pci": "0000:9d:00.0"}}}}
    wrong: dict[str, Any] = {"nic_overrides": {"rail7": {}}}
    inventory = site / "inventories/prod.py"
    hosts = [("@fake/gpu-01", odd), ("@fake/gpu-02", wrong)]
    inventory.write_text(f"{IMPORT}servers = ({hosts!r}, {FAKE!r})\n")
    refused = failure(dry(site))
    said = "gpu-02.nic_overrides (host): 'rail7' is not a name in nics; known names: rail0"
    assert said in refused and "Connecting" not in refused
    success(dry(site, "--limit", "@fake/gpu-01"))
    inventory.write_text(f"{IMPORT}servers = ({hosts[:1]!r}, {FAKE!r})\n")
    assert data_of(inventory)[0]["nics"] == [{"name": "rail0", "select": {"pci": "0000:9d:00.0"}, "vfs": {"count": 8}}]


def test_explain_names_the_file_of_each_value_and_the_defaults(site: Path) -> None:
    secrets = {"_sudo_password": "hunter2", "ssh_paramiko_connect_kwargs": {"passphrase": "hunter2"}}
    hosts = [
        ("gpu-01", {"nic_overrides": {"rail0": {"vfs": {"count": 4}}}, "ssh_user": "ops", "_sudo": True, **secrets})
    ]
    (site / "inventories/prod.py").write_text(f"servers = ({hosts!r}, {{'irqs': {{'exclude_cpus': '0-1'}}}})\n")
    (site / "group_data/all.py").write_text("site_rack = 7\nrps = {'enable': False}\nirqs = {'pin': False}\n")
    lines = explained(site, "gpu-01")
    assert {
        "nics.rail0.select.pci = '0000:18:00.0'  # group_data/servers.py",
        "nics.rail0.vfs.count = 4  # inventories/prod.py, host, nic_overrides",
        "irqs.exclude_cpus = '0-1'  # inventories/prod.py, group servers",
        "irqs.pin = True  # default",
        "rps.enable = False  # group_data/all.py",
        "node_name = 'gpu-01'  # default",
        "ready_timeout = 120  # default",
        "ofed = None  # default",
        "site_rack = 7  # group_data/all.py",
        "ssh_user = 'ops'  # inventories/prod.py, host",
        "_sudo = True  # inventories/prod.py, host",
    } <= set(lines)
    assert not any("hunter2" in line or "rail0.mtu" in line for line in lines)
    assert "nics.rail0.mtu = None  # default" in explained(site, "gpu-01", "nics")
    rows = [json.loads(line) for line in explained(site, "gpu-01", "irqs", "--json")]
    assert rows[0] == {"key": "irqs.exclude_cpus", "value": "0-1", "source": "inventories/prod.py, group servers"}


def test_explain_knows_the_worked_example() -> None:
    out = success(trackbed("explain", "gpu-07.example.net", "--inventory", ROOT / "inventories/prod.py"))
    assert f"nics.rail7.mtu = 9000  # {ROOT}/group_data/connectx_roce.py\n" in out
    assert f"disruption.allow = 'none'  # {ROOT}/inventories/prod.py, group careful\n" in out
    short = trackbed("explain", "gpu-07", "--inventory", ROOT / "inventories/prod.py")
    assert (short.returncode, "has no host gpu-07; did you mean 'gpu-07.example.net'?" in short.stderr) == (1, True)
    absent = trackbed("explain", "gpu-99", "--inventory", ROOT / "inventories/prod.py")
    assert (absent.returncode, "has no host gpu-99; its hosts are" in absent.stderr) == (1, True)


@pytest.mark.parametrize(
    ("key", "code", "said"),
    [
        ("nisc", 1, "nisc is not a key; did you mean 'nics'?"),
        ("irqs.pin", 0, "irqs.pin = True  # default"),
        ("irqs.pni", 1, "irqs.pni is not a key; did you mean 'irqs.pin'?"),
        ("nics.rail7.mtu", 0, "nics.rail7.mtu = 9000  # "),
        ("_sudo", 0, "_sudo = False  # default"),
        ("_sudo_password", 1, "_sudo_password is a secret, which is not shown"),
        ("ssh_port", 0, "ssh_port = None  # default"),
        ("ssh_connect_retries", 0, "ssh_connect_retries = 0  # default"),
        ("ssh_password", 1, "ssh_password is a secret, which is not shown"),
    ],
)
def test_explain_knows_each_key_of_the_connection_and_shows_no_secret(key: str, code: int, said: str) -> None:
    done = trackbed("explain", "gpu-07.example.net", key, "--inventory", ROOT / "inventories/prod.py")
    assert (done.returncode, said in done.stdout + done.stderr) == (code, True), done.stdout + done.stderr


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"nic_overrides": {"rail9": {}}, "mdoe": "observe"}, "'rail9' is not a name in nics"),
        ({"ssh_port": 70000}, "gpu-01.ssh_port: 70000 is out of range; give 1 to 65535"),
        ({"ssh_user": 5}, "gpu-01.ssh_user: "),
    ],
)
def test_explain_of_wrong_data_says_what_is_wrong(site: Path, wrong: dict[str, Any], said: str) -> None:
    (site / "inventories/prod.py").write_text(f"servers = {[('gpu-01', wrong)]!r}\n")
    assert said in failure(trackbed("explain", "gpu-01", "--inventory", site / "inventories/prod.py"))


def test_the_fleet_s_commands_find_the_site(site: Path) -> None:
    (site / "inventories/prod.py").write_text("servers = ['gpu-01.example.net', 'gpu-02.example.net']\n")
    (site / "group_data/servers.py").write_text("node_name = 'of-the-group'\n")
    with pytest.raises(Failed, match="have the same node_name, of-the-group"):
        Inventory.read(site / "inventories/prod.py")
