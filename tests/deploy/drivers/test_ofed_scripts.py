"""The scripts of OFED's modules, run on files that are made here."""

import hashlib
import os
import subprocess
import tarfile
from pathlib import Path

import pytest

from tasks.common.commands import script
from tasks.drivers.ofed import mlnx_ofed, modules
from tasks.drivers.ofed.users import USERS, OfedUsers
from tasks.packages import holds
from tasks.packages.dkms import Module
from tests.deploy.scripts import process, ran, sh
from tests.stand_ins import program, text_file


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A node's files: two modules of DKMS, one of them loaded."""
    kernel = os.uname().release
    folder = tmp_path / f"var/lib/dkms/mlnx-ofed-kernel/25.10/{kernel}/x86_64/module"
    folder.mkdir(parents=True)
    for name in ("rdma_rxe.ko.xz", "mlx5-ib.ko"):
        (folder / name).touch()
    module(tmp_path, "rdma_rxe", refcnt=1)
    (tmp_path / "sys/module/rdma_rxe/srcversion").write_text("AB\n")
    text_file(tmp_path / "proc/1/mounts", "/dev/vda / ext4 rw 0 0\n")
    return tmp_path


def module(root: Path, name: str, refcnt: int = 0, holders: tuple[str, ...] = ()) -> Path:
    folder = root / "sys/module" / name
    (folder / "holders").mkdir(parents=True)
    (folder / "refcnt").write_text(f"{refcnt}\n")
    for holder in holders:
        (folder / "holders" / holder).mkdir()
    return folder


def test_the_modules_of_an_ofed_are_found(root: Path) -> None:
    program(root / "bin/modinfo", '[ "$1" = -F ] && echo CD || echo /lib/modules/K/updates/dkms/"$3".ko')
    fact = modules.OfedStack().process(sh(modules._STACK, root, *modules.NAMES, programs=root / "bin"))
    rxe = Module("rdma_rxe", "/lib/modules/K/updates/dkms/rdma_rxe.ko", "CD", "AB", 1)
    assert fact == modules.Stack(os.uname().release, True, 2, (rxe,))
    assert rxe.stale and rxe.out_of_tree
    nothing = modules.OfedStack().process(sh(modules._STACK, root / "absent", *modules.NAMES))
    assert nothing == modules.Stack(os.uname().release, False, 0, ())


def test_modules_of_packages_without_dkms_count(tmp_path: Path) -> None:
    kernel = os.uname().release
    lib = tmp_path / f"lib/modules/{kernel}"
    for file in ("extra/mlnx-ofa_kernel/net/mlx5_core.ko.xz", "weak-updates/iser/ib_iser.ko", "extra/other/other.ko"):
        text_file(lib / file)
    listing = tmp_path / "var/lib/dpkg/info/mlnx-ofed-kernel-modules.list"
    text_file(listing, f"/lib/modules/{kernel}/updates/mlx5_ib.ko\n/lib/modules/1.2.3/updates/old.ko\n/usr/share/doc\n")
    message = sh(modules._STACK, tmp_path, *modules.NAMES)
    built = [line.split()[1] for line in message if line.startswith("built")]
    assert built == ["ib_iser", "mlx5_core", "mlx5_ib"]


def users(root: Path, *loaded: str) -> list[str]:
    arguments = ("storage_rdma ib_iser", "nvidia_peermem", *loaded)
    return OfedUsers().process(sh(USERS, root, *arguments, programs=root / "bin"))


def test_modules_held_only_by_other_modules_have_no_users(root: Path) -> None:
    module(root, "nvidia_peermem")
    # Held by a module alone, which goes first.
    module(root, "ib_iser", 1, ("other",))
    assert users(root, "rdma_rxe") == []


def test_users_of_the_modules_are_named(root: Path) -> None:
    module(root, "nvidia_peermem", 2)
    module(root, "ib_iser", 2, ("other",))
    text_file(root / "sys/class/nvme/nvme1/transport", "rdma\n")
    (root / "proc/1/mounts").write_text(
        "10.0.0.1:/a /data nfs4 rw,vers=4.2,proto=rdma,port=20049 0 0\n"
        "10.0.0.1@o2ib:/b /scratch lustre rw 0 0\n"
        "10.0.0.1:/c /home nfs4 rw,proto=tcp 0 0\n"
    )
    opened = ("infiniband/uverbs0", "infiniband/uverbs1", "infiniband/uverbs0", "null")
    process(root, 42, "ib_write_bw", *(f"/dev/{name}" for name in opened))
    assert users(root, "rdma_rxe") == [
        "nvidia_peermem: 2 in use (GPU memory that is registered)",
        "ib_iser: 1 in use (storage over RDMA)",
        "nvme1 is NVMe over RDMA",
        "/data is mounted over RDMA",
        "/scratch is mounted over RDMA",
        "ib_write_bw (pid 42) has uverbs0 open",
        "ib_write_bw (pid 42) has uverbs1 open",
    ]


@pytest.mark.parametrize(
    "mount",
    [
        "10.0.0.1:/a /data nfs rw,rdma,port=20049 0 0",
        "[fd00::1]:/a /data nfs4 rw,proto=rdma6,port=20049 0 0",
        "//10.0.0.1/a /data cifs rw,vers=3.1.1,rdma,addr=10.0.0.1 0 0",
        "10.0.0.1 /data 9p rw,trans=rdma 0 0",
        "/dev/mapper/ost0 /data lustre ro,svname=fs-OST0000,mgsnode=10.0.0.1@o2ib 0 0",
        "beegfs_nodev /data beegfs rw,cfgFile=/etc/beegfs/beegfs-client.conf 0 0",
    ],
)
def test_a_file_system_over_rdma_is_a_user(root: Path, mount: str) -> None:
    (root / "proc/1/mounts").write_text(f"{mount}\n//10.0.0.1/b /home cifs rw,vers=3.1.1,nordma 0 0\n")
    assert users(root, "rdma_rxe") == ["/data is mounted over RDMA"]


def test_an_auxiliary_driver_that_a_process_uses_is_a_user(root: Path) -> None:
    module(root, "mlx5_fwctl", 1)
    assert users(root, "mlx5_core") == ["mlx5_fwctl: 1 in use"]


def test_a_module_that_needs_one_that_goes_is_a_user(root: Path) -> None:
    module(root, "rdma_cm", 4, ("ksmbd", "mlx5_ib", "ib_iser", "mlx5_vdpa", "mlx5_fwctl", "mlx5_dpll"))
    assert users(root, "rdma_cm", "mlx5_ib") == ["ksmbd needs rdma_cm"]


QUEUE_PAIRS = """cat <<'EOF'
link mlx5_0/1 lqpn 1 type GSI state RTS sq-psn 58 comm [ib_core]
link mlx5_0/1 lqpn 7 rqpn 8 type RC state RTS rq-psn 1 sq-psn 2 path-mig-state MIGRATED comm [smc]
link mlx5_1/1 lqpn 9 type UD state RTS sq-psn 0 comm [ib_ipoib]
link mlx5_1/1 lqpn 10 rqpn 3 type RC state RTS sq-psn 0 pid 42 comm python3
EOF"""


def test_a_queue_pair_of_the_kernel_is_a_user(root: Path) -> None:
    program(root / "bin/rdma", QUEUE_PAIRS)
    assert users(root, "rdma_rxe") == ["smc of the kernel has a queue pair of mlx5_0"]


IP = """
case "$*" in
  *"-6 route"*) ;;
  *route*) echo 'default via 10.0.0.1 dev bond0'; echo '10.0.0.0/24 dev eth1 scope link' ;;
  "-o addr show") echo '3: eth2 inet 10.9.0.7/24 scope global eth2' ;;
  *"dev ens1"*) echo '2: ens1 inet 10.0.0.7/24 scope global ens1'; echo '2: ens1 inet6 fe80::7/64 scope link' ;;
esac
"""


def test_users_of_netdevs_and_vfs_are_named(root: Path) -> None:
    driver = root / "sys/bus/pci/drivers/mlx5_core"
    (driver / "0000:21:00.0/net/ens1").mkdir(parents=True)
    (driver / "0000:21:00.2").mkdir()
    for function in driver.iterdir():
        (function / "class").write_text("0x020000\n")
    # An InfiniBand function need not have a netdev.
    text_file(driver / "0000:22:00.0/class", "0x020700\n")
    (driver / "module").symlink_to("../../../../module/mlx5_core")
    (root / "sys/module/mlx5_core").mkdir()
    (root / "vf/0000:21:00.3").mkdir(parents=True)
    (root / "vf/0000:21:00.3/driver").symlink_to("../../drivers/vfio-pci")
    (driver / "0000:21:00.0/virtfn0").symlink_to(root / "vf/0000:21:00.3")
    netdev = root / "sys/class/net/ens1"
    (netdev / "upper_bond0").mkdir(parents=True)
    (netdev / "device").symlink_to("../../../bus/pci/drivers/mlx5_core/0000:21:00.0")
    (driver / "0000:21:00.0/driver").symlink_to("../../mlx5_core")
    with_programs(root, "10.0.0.7:22")
    assert users(root, "mlx5_core") == [
        "ens1 carries a connection of sshd (10.0.0.7)",
        "bond0 is on top of ens1",
        "a route goes through bond0",
        "0000:21:00.3 is bound to vfio-pci",
        "0000:21:00.2 is in another network namespace",
    ]
    # Another module's netdevs stay.
    assert users(root, "rdma_rxe") == []


def with_programs(root: Path, *ends: str) -> None:
    """A node's programs; ``ends``: of connections, as ss prints them, of sshd if the second is not given."""
    program(root / "bin/ip", IP)
    lines = [f"0 0 {end}" if " " in end else f'0 0 {end} 10.0.0.1:4000 users:(("sshd",pid=1,fd=4))' for end in ends]
    program(root / "bin/ss", "\n".join(f"echo '{line}'" for line in lines))


@pytest.mark.parametrize(
    ("ends", "found"),
    [
        ("10.0.0.7:22", "sshd (10.0.0.7)"),
        ("[::ffff:10.0.0.7]:22", "sshd (10.0.0.7)"),
        ("10.0.0.7%vrf0:22", "sshd (10.0.0.7)"),
        ("[fe80::7]%ens1:22", "sshd (fe80::7)"),
        ("[fd00::7]:22", None),
        ("[::ffff:10.0.0.70]:22", None),
        ('10.0.0.7:800 10.0.0.9:6443 users:(("kube proxy",pid=7,fd=4),("sh",pid=8,fd=4))', "kube proxy (10.0.0.7)"),
        ("10.0.0.7:800 10.0.0.9:2049", "the kernel (10.0.0.7)"),
        ("10.0.0.7:800 10.0.0.7:22", None),
        ("10.0.0.7:800 [::ffff:10.9.0.7]:22", None),
        ("[fe80::7]%ens1:800 [fe80::7]:22", None),
    ],
)
def test_a_connection_with_another_machine_is_a_user(root: Path, ends: str, found: str | None) -> None:
    function = root / "sys/bus/pci/drivers/mlx5_core/0000:21:00.0"
    (root / "sys/module/mlx5_core").mkdir()
    (root / "sys/class/net/ens1").mkdir(parents=True)
    (function / "driver").mkdir(parents=True)
    (function / "driver/module").symlink_to(root / "sys/module/mlx5_core")
    (root / "sys/class/net/ens1/device").symlink_to(function)
    with_programs(root, ends)
    assert users(root, "mlx5_core") == ([f"ens1 carries a connection of {found}"] if found else [])


def test_an_initramfs_that_is_older_than_its_module_is_found(tmp_path: Path) -> None:
    image = tmp_path / f"boot/initrd.img-{os.uname().release}"
    text_file(image)
    for name in ("mlx5_core.ko", "rdma_rxe.ko"):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (2_000_000_000, 2_000_000_000))
    program(tmp_path / "bin/lsinitramfs", "echo usr/lib/modules/K/kernel/drivers/mlx5_core.ko")
    files = (tmp_path / "mlx5_core.ko", tmp_path / "rdma_rxe.ko")
    assert sh(modules._OLD_INITRAMFS, tmp_path, *files, programs=tmp_path / "bin") == ["mlx5_core"]
    os.utime(image, (2_100_000_000, 2_100_000_000))
    assert sh(modules._OLD_INITRAMFS, tmp_path, *files, programs=tmp_path / "bin") == []


@pytest.mark.parametrize(
    "name", ["nvme_rdma", "mlx5_vdpa", pytest.param("mlx5_fwctl", id="doca-driver-build-375"), "mlx5_dpll"]
)
def test_an_unloaded_module_is_loaded_again_although_others_could_not_be_unloaded(tmp_path: Path, name: str) -> None:
    loaded = module(tmp_path, name)
    program(tmp_path / "bin/modprobe", f'[ "$1" = -r ] || {{ echo "loads $1"; exit; }}; rm -r {loaded}; exit 1')
    program(tmp_path / "bin/systemctl", "exit 1")
    program(tmp_path / "bin/udevadm", "")
    text = modules._RELOAD.replace("/sys/module", str(tmp_path / "sys/module"))
    assert f"loads {name}" in sh(text, "nvme_rdma", "", programs=tmp_path / "bin")


def install(root: Path, installer: str) -> subprocess.CompletedProcess[str]:
    """Install a bundle with this installer on a node of Debian's family, with the programs of ``root / "bin"``."""
    program(root / "MLNX/mlnxofedinstall", installer)
    (root / "MLNX/DEBS").mkdir(exist_ok=True)
    bundle = root / "bundle.tgz"
    with tarfile.open(bundle, "w:gz") as made:
        made.add(root / "MLNX", "MLNX")
    if not (root / "var").exists():
        text_file(root / "var/installed", "sha256\nMLNX_OFED\nold-package\n")
    program(root / "bin/dpkg-query", "")
    program(
        root / "bin/apt-mark",
        f'case $1 in hold) echo "$2" >> {root}/held ;; unhold) echo "$2" >> {root}/released ;; esac',
    )
    text = holds.NOTED + mlnx_ofed.HOLDS["debian"] + mlnx_ofed._INSTALL.replace("/lib/modules/$kernel", str(root))
    (root / "build/include").mkdir(parents=True, exist_ok=True)
    sha256 = hashlib.sha256(bundle.read_bytes()).hexdigest()
    return ran(script(text, str(bundle), sha256, f"{root}/var", f"{root}/holds"), root / "bin")


@pytest.mark.parametrize(("held", "runs"), [(2, True), (100, False)])
def test_an_installer_waits_for_another_dpkg(tmp_path: Path, held: int, runs: bool) -> None:
    log = tmp_path / "log"
    log.touch()
    # As dpkg 1.21.22 prints it.
    said = "dpkg: error: dpkg frontend lock was locked by another process with pid 612"
    program(tmp_path / "bin/dpkg", f'if [ "$(wc -l < {log})" -lt {held} ]; then echo "{said}" >&2; exit 2; fi')
    program(tmp_path / "bin/sleep", f"echo slept >> {log}")
    program(tmp_path / "bin/ofed_info", "echo MLNX_OFED")
    done = install(tmp_path, f"echo installs; echo ran >> {log}")
    assert (done.returncode, "installs" in done.stdout) == (0 if runs else 1, runs), done.stderr
    assert (said in done.stderr) != runs
    # A bundle that is not replaced stays held and recorded.
    assert ("old-package" in (tmp_path / "var/installed").read_text()) != runs
    assert (tmp_path / "released").exists() == runs
    assert log.read_text() == ("slept\n" * 2 + "ran\n" if runs else "slept\n" * 59)


def test_an_installer_that_fails_fails_the_deploy_and_its_packages_are_held_again(tmp_path: Path) -> None:
    program(tmp_path / "bin/dpkg", "")
    # It runs apt, after which needrestart would restart services.
    done = install(tmp_path, "exit $((NEEDRESTART_SUSPEND + 2))")
    assert (done.returncode, "mlnxofedinstall failed" in done.stderr) == (1, True), done.stderr
    assert (tmp_path / "held").read_text() == "old-package\n"
    assert (tmp_path / "var/installed").read_text().split() == ["none", "none", "old-package"]


@pytest.mark.parametrize("ends", ["exit 1", "kill -KILL $PPID"])
def test_an_installer_that_runs_again_finds_no_package_held(tmp_path: Path, ends: str) -> None:
    """It removes those of the bundle before."""
    program(tmp_path / "bin/dpkg", "")
    program(tmp_path / "bin/ofed_info", "echo MLNX_OFED")
    assert install(tmp_path, ends).returncode != 0
    (tmp_path / "released").unlink()
    assert install(tmp_path, f'[ "$(cat {tmp_path}/released)" = old-package ]').returncode == 0
    assert "old-package" not in (tmp_path / "var/installed").read_text()


def test_a_package_that_an_interrupted_installer_has_removed_is_not_released(tmp_path: Path) -> None:
    """apt-mark fails for a package that it does not know."""
    program(tmp_path / "bin/dpkg-query", "exit 1")
    program(tmp_path / "bin/apt-mark", f"touch {tmp_path}/asked; exit 100")
    sh(f"{holds.NOTED}{mlnx_ofed.HOLDS['debian']}release old-package", programs=tmp_path / "bin")
    assert not (tmp_path / "asked").exists()
