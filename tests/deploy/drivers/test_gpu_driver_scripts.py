"""The scripts for NVIDIA's driver: these tests run them in a temporary folder."""

import shutil
from pathlib import Path

import pytest

from tasks.drivers import gpu_driver
from tasks.drivers.device_nodes import HOLDERS
from tasks.drivers.gpu_driver import fabric, services, versions
from tasks.drivers.gpu_driver import modules as driver_modules
from tasks.packages import _AVAILABLE, AvailableVersions, Family
from tests.deploy.scripts import process, sh
from tests.stand_ins import program, text_file


def test_processes_that_have_a_gpu_open_are_found(tmp_path: Path) -> None:
    unit = "0::/system.slice/nvidia-{}.service"
    process(tmp_path, 1, "systemd", "/dev/null")
    process(tmp_path, 20, "nvidia-persiste", "/dev/nvidiactl", cgroup=unit.format("persistenced"))
    process(tmp_path, 21, "nv-fabricmanage", "/dev/nvidia-nvswitchctl", cgroup=unit.format("fabricmanager"))
    process(tmp_path, 30, "python3", "/dev/null", "/dev/nvidia0", "/dev/nvidia-uvm")
    process(tmp_path, 31, "a b", "/dev/nvidia-caps/nvidia-cap1")
    process(tmp_path, 32, "cat", "/home/x/dev/nvidia0")
    (tmp_path / "proc/40").mkdir()
    assert driver_modules.GpuUsers().process(sh(driver_modules._USERS, tmp_path)) == ["python3 (30)", "a b (31)"]


def test_a_device_that_a_container_has_under_another_path_is_found_by_its_number(tmp_path: Path) -> None:
    """/dev/full stands for the GPU's node as the container has it. What the container calls /dev/zero is another device."""
    (tmp_path / "dev").mkdir()
    for host, here in (("nvidia0", "full"), ("nvidia1", "zero"), ("zero", "null")):
        (tmp_path / "dev" / host).symlink_to(f"/dev/{here}")
    process(tmp_path, 30, "python3", "/dev/full")
    process(tmp_path, 31, "bash", "/dev/null")
    assert sh(driver_modules._USERS, tmp_path) == ["python3 (30)"]
    assert sh(f'{HOLDERS}holders "$1" /dev/zero', tmp_path) == ["31 /dev/zero"]
    process(tmp_path, 32, "other", "/dev/zero")
    assert sh(f'{HOLDERS}holders "$1" /dev/zero', tmp_path) == ["31 /dev/zero"]


@pytest.mark.parametrize(
    ("smi", "report"),
    [
        ("echo 580.95.05; echo 580.95.05", ["version 580.95.05"]),
        ("echo 580.95.05; echo 570.1", ["version 570.1", "version 580.95.05"]),
        ("echo 'No devices were found'; exit 6", ["failed No devices were found"]),
        ("exit 124", ["failed no answer within 120 s; look at the kernel log (dmesg), and reboot the node"]),
        (None, ["missing"]),
    ],
)
def test_versions_and_errors_of_nvidia_smi_are_read(tmp_path: Path, smi: str | None, report: list[str]) -> None:
    # No other programs: the machine that runs this test may have a real nvidia-smi.
    for name in ("awk", "sed", "sh", "sort", "timeout"):
        (tmp_path / name).symlink_to(shutil.which(name) or name)
    if smi:
        program(tmp_path / "nvidia-smi", smi)
    assert sh(gpu_driver._CHECK, PATH=str(tmp_path)) == report


def smi(*fabrics: tuple[str, str]) -> str:
    """The output of `nvidia-smi -q`, cut short, for GPUs with these states and statuses of the fabric."""
    gpus = [
        f"GPU 00000000:{number}B:00.0\n    Product Name                          : NVIDIA B200\n"
        "    Clocks Event Reasons\n        Status                            : Fine\n"
        f"    Fabric\n        State                             : {state}\n"
        f"        Status                            : {status}\n        CliqueId                          : 0\n"
        "        Health\n            Bandwidth                     : Full\n"
        "    GSP Firmware Version                  : 580.95.05\n"
        for number, (state, status) in enumerate(fabrics)
    ]
    return "==============NVSMI LOG==============\n\nAttached GPUs                             : 8\n" + "".join(gpus)


@pytest.mark.parametrize(
    ("fabrics", "report"),
    [
        ([("Completed", "Success")] * 2, []),
        ([("N/A", "N/A")], []),
        (
            [("Completed", "Success"), ("In Progress", "N/A"), ("Completed", "Insufficient Resources")],
            [
                "fabric state of 00000000:1B:00.0: In Progress, status: N/A",
                "fabric state of 00000000:2B:00.0: Completed, status: Insufficient Resources",
            ],
        ),
        ([("Not Started", "N/A")], ["fabric state of 00000000:0B:00.0: Not Started, status: N/A"]),
    ],
)
def test_gpus_that_the_fabric_has_not_registered_are_named(
    tmp_path: Path, fabrics: list[tuple[str, str]], report: list[str]
) -> None:
    (tmp_path / "q").write_text(smi(*fabrics))
    program(tmp_path / "nvidia-smi", f"case $1 in -q) cat {tmp_path}/q ;; *) echo 580.95.05 ;; esac")
    assert sh(gpu_driver._CHECK, programs=tmp_path) == ["version 580.95.05", *report]


def test_a_fabric_that_registers_gpus_is_waited_for(tmp_path: Path) -> None:
    for name, fabrics in (("q", [("In Progress", "N/A")]), ("later", [("Completed", "Success")])):
        (tmp_path / name).write_text(smi(*fabrics))
    program(tmp_path / "nvidia-smi", f"cat {tmp_path}/q")
    # What is slept for is that the state changes; the third time it has.
    program(tmp_path / "sleep", f'cd {tmp_path}; echo >> slept; if [ "$(wc -l < slept)" = 3 ]; then mv later q; fi')
    sh(fabric.WAIT, programs=tmp_path)
    assert (tmp_path / "slept").read_text() == "\n" * 3
    (tmp_path / "q").write_text(smi(("In Progress", "N/A")))
    sh(fabric.WAIT, programs=tmp_path)
    assert (tmp_path / "slept").read_text() == "\n" * 27


def device(root: Path, address: str, vendor: str, kind: str, driver: str = "", vpd: str = "") -> None:
    path = root / "sys/bus/pci/devices" / address
    text_file(path / "vendor", f"{vendor}\n")
    (path / "class").write_text(f"{kind}\n")
    if driver:
        (path / "driver").symlink_to(f"../../drivers/{driver}")
    if vpd:
        (path / "vpd").write_text(vpd)


def test_the_driver_of_each_gpu_is_read(tmp_path: Path) -> None:
    device(tmp_path, "0000:17:00.0", "0x10de", "0x030200", "vfio-pci")
    device(tmp_path, "0000:17:00.1", "0x10de", "0x040300", "snd_hda_intel")
    device(tmp_path, "0000:18:00.0", "0x10de", "0x030000")
    device(tmp_path, "0000:19:00.0", "0x10de", "0x068000", "nvidia-nvswitch")
    device(tmp_path, "0000:1a:00.0", "0x1a03", "0x030000", "ast")
    answer = sh(driver_modules.GpuDrivers.shell, tmp_path)
    assert driver_modules.GpuDrivers().process(answer) == {"0000:17:00.0": "vfio-pci", "0000:18:00.0": ""}


@pytest.mark.parametrize("driver", ["mlx5_core", pytest.param("", id="gpu-operator-2781")])
def test_nvswitches_are_found_by_the_product_data_of_their_bridges(tmp_path: Path, driver: str) -> None:
    device(tmp_path, "0000:05:00.0", "0x15b3", "0x020700", driver, "\x82,\0ConnectX-7 V0\x08SMDL=SW_MNG")
    device(tmp_path, "0000:06:00.0", "0x15b3", "0x020700", "mlx5_core", "\x82,\0ConnectX-7")
    device(tmp_path, "0000:07:00.0", "0x15b3", "0x020000")
    assert sh(fabric._SWITCHES, tmp_path) == ["0000:05:00.0"]


@pytest.mark.parametrize(
    ("family", "manager", "output"),
    [
        ("debian", "apt-cache", r"  libcuda1 | 580.95.05-1 | http://a.b P\nnvidia-open | 590.1-1 | http://a.b P"),
        ("rhel", "dnf", r"libcuda1 580.95.05\n\nnvidia-open 590.1\n"),
        ("rhel", "dnf", None),
    ],
)  # fmt: skip
def test_versions_of_the_repositories_are_read(
    tmp_path: Path, family: Family, manager: str, output: str | None
) -> None:
    program(
        tmp_path / manager,
        f"printf '{output}'" if output else "echo 'Error: Cache-only enabled but no cache' >&2; exit 1",
    )
    lines = sh(_AVAILABLE[family], "libcuda1", "nvidia-open", programs=tmp_path)
    available = AvailableVersions().process(lines)
    assert [(name, versions.is_at("580.95.05", version)) for name, version in available] == (
        [("libcuda1", True), ("nvidia-open", False)] if output else []
    )


def load(
    tmp_path: Path, loaded: tuple[str, ...], active: tuple[str, ...] = (), busy: str = "", faulty: str = ""
) -> tuple[list[str], set[str]]:
    """Run the script on a folder that stands for /sys/module; what it called, and what is loaded then."""
    for name in loaded:
        (tmp_path / "module" / name).mkdir(parents=True)
    log = tmp_path / "log"
    program(
        tmp_path / "bin/rmmod",
        f"""cd {tmp_path}/module && [ "$1" != "{busy}" ] || exit 1
        [ "$1" != nvidia ] || [ "$(ls)" = nvidia ] || exit 1  # the others hold it
        rmdir "$1" && echo "rmmod $1" >> {log}""",
    )
    program(tmp_path / "bin/dmesg")
    program(
        tmp_path / "bin/modprobe",
        f'[ "$1" != "{faulty}" ] && mkdir -p {tmp_path}/module/"$1" && echo "modprobe $1" >> {log}',
    )
    cases = " | ".join(active) or "none"
    program(
        tmp_path / "bin/systemctl",
        f'case "$3" in {cases}) ;; *) [ "$2" != is-active ] || exit 3 ;; esac; echo "$*" >> {log}',
    )
    text = driver_modules._LOAD.replace("/sys/module/", f"{tmp_path}/module/")
    sh(text, "yes" if loaded else "no", "remedy", programs=tmp_path / "bin")
    calls = [line for line in log.read_text().splitlines() if "is-active" not in line]
    return calls, {path.name for path in (tmp_path / "module").iterdir()}


def test_the_driver_is_loaded_if_it_is_not(tmp_path: Path) -> None:
    assert load(tmp_path, ()) == (["modprobe nvidia"], {"nvidia"})


def test_the_driver_is_reloaded_with_the_modules_on_top_of_it(tmp_path: Path) -> None:
    calls, loaded = load(tmp_path, ("nvidia", "nvidia_uvm", "nvidia_peermem"), active=("nvidia-persistenced",))
    assert calls == [
        "stop nvidia-persistenced",
        "rmmod nvidia_peermem",
        "rmmod nvidia_uvm",
        "rmmod nvidia",
        "modprobe nvidia",
        "modprobe nvidia",
        "modprobe nvidia_uvm",
        "modprobe nvidia_peermem",
        "start nvidia-persistenced",
    ]
    assert loaded == {"nvidia", "nvidia_uvm", "nvidia_peermem"}


@pytest.mark.parametrize(
    "other",
    [
        pytest.param("gdrdrv", id="gpu-driver-container-869"),
        pytest.param("nvidia_peermem", id="gpu-driver-container-965"),
        "nvidia_fs",
    ],
)
def test_a_module_of_gpudirect_is_unloaded_before_the_driver_that_it_holds(tmp_path: Path, other: str) -> None:
    calls, loaded = load(tmp_path, ("nvidia", other))
    assert calls == [f"rmmod {other}", "rmmod nvidia", "modprobe nvidia", "modprobe nvidia", f"modprobe {other}"]
    assert loaded == {"nvidia", other}


def test_a_module_that_cannot_be_unloaded_leaves_the_others_loaded(tmp_path: Path) -> None:
    _, loaded = load(tmp_path, ("nvidia", "nvidia_uvm", "nvidia_peermem"), busy="nvidia_uvm")
    assert loaded == {"nvidia", "nvidia_uvm", "nvidia_peermem"}


def test_a_module_that_does_not_load_again_with_the_driver_is_named(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"do not load again: gdrdrv;"):
        load(tmp_path, ("nvidia", "gdrdrv", "nvidia_uvm"), active=("nvidia-persistenced",), faulty="gdrdrv")
    assert (tmp_path / "log").read_text().endswith("modprobe nvidia_uvm\nstart nvidia-persistenced\n")


def test_a_driver_that_does_not_load_shows_the_remedy(tmp_path: Path) -> None:
    program(tmp_path / "modprobe", "exit 1")
    program(tmp_path / "dmesg", "echo 'NVRM: No NVIDIA GPU found.'")
    with pytest.raises(AssertionError, match=r"NVRM: No NVIDIA GPU found\.\s+the remedy"):
        sh(driver_modules._LOAD, "no", "the remedy", programs=tmp_path)


def test_the_daemon_s_command_is_that_of_the_operators_drop_in_and_not_of_ours(tmp_path: Path) -> None:
    unit, theirs, ours = (tmp_path / name for name in ("nvidia-persistenced.service", "override.conf", "trackbed.conf"))
    unit.write_text("[Service]\nExecStartPre=/bin/true\nExecStart=/usr/bin/nvidia-persistenced --no-persistence-mode\n")
    theirs.write_text("[Service]\nExecStart=\nExecStart=/usr/bin/nvidia-persistenced --verbose\n")
    ours.write_text("[Service]\nExecStart=\nExecStart=/usr/bin/other\n")
    program(
        tmp_path / "bin/systemctl",
        f'case "$*" in *FragmentPath*) echo {unit} ;; *) [ -z "$DROP_INS" ] || echo "$DROP_INS" ;; esac',
    )

    def command(drop_ins: str) -> str | None:
        output = sh(
            services._COMMAND, "nvidia-persistenced.service", ours, programs=tmp_path / "bin", DROP_INS=drop_ins
        )
        return services.DaemonCommand().process(output)

    assert command(str(ours)) == "/usr/bin/nvidia-persistenced --no-persistence-mode"
    assert command(f"{theirs} {ours}") == "/usr/bin/nvidia-persistenced --verbose"
