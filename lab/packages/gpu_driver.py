"""Stand-ins for NVIDIA's driver: packages of the names in its repository for Debian, with modules that drive nothing.

The module nvidia is the lab's (lab/packages/gpu), with the driver's version. nvidia-smi compares that with its own version, as
NVIDIA's does. The fabric manager starts only where there is a device of an NVSwitch. The dependencies take newer versions, too,
so that only apt's preferences hold the older one.
"""

import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from lab import image, repository
from lab.packages import gpu, toolchain

VERSIONS = ("580.95.05", "580.105.08")
NVSWITCH = "/dev/nvidia-nvswitchctl"
CONF = """\
BUILT_MODULE_NAME[0]="nvidia"
BUILT_MODULE_NAME[1]="nvidia_peermem"
DEST_MODULE_LOCATION[0]="/updates"
DEST_MODULE_LOCATION[1]="/updates"
MAKE="make -C ${kernel_source_dir} M=${dkms_tree}/nvidia/${PACKAGE_VERSION}/build modules"
CLEAN="make -C ${kernel_source_dir} M=${dkms_tree}/nvidia/${PACKAGE_VERSION}/build clean"
"""
SMI = """\
#!/bin/sh
loaded=$(cat /sys/module/nvidia/version 2>/dev/null) || { echo "NVIDIA-SMI has failed: there is no driver"; exit 9; }
[ "$loaded" = VERSION ] || { echo "Failed to initialize NVML: Driver/library version mismatch"; exit 18; }
echo VERSION
"""
# Its name is that of the process, which the deploy knows.
DAEMON = """\
#!/bin/sh
while :; do sleep 3600; done
"""
UNIT = """\
[Unit]
Description=NAME of Trackbed's lab

[Service]
ExecStartPre=/usr/bin/test -e DEVICE
ExecStart=/usr/bin/PROGRAM

[Install]
WantedBy=multi-user.target
"""
POSTINST = "#!/bin/sh\nset -e\nsystemctl daemon-reload\n"


def vendor(disk: image.Image) -> repository.Repository:
    """A repository with both versions, and with what a node of this image needs to build the modules."""
    inputs = [str(disk.folder).encode(), *repository.source_of(__file__, toolchain.__file__, *sources())]

    def build(pool: Path) -> None:
        toolchain.link(disk, pool)
        for version in VERSIONS:
            packages(pool, version)

    return repository.ensure("gpu-driver", inputs, build)


def sources() -> tuple[str, ...]:
    """The files of the modules."""
    return tuple(str(gpu.HERE / name) for name in ("Makefile", "nvidia.c", "nvidia_peermem.c"))


def packages(pool: Path, version: str) -> None:
    """Make the packages of one version."""
    revised = f"{version}-1"
    with TemporaryDirectory(prefix="trackbed-gpu-driver-") as folder:
        tree = Path(folder) / "source"
        tree.mkdir()
        for source in sources():
            shutil.copy(source, tree)
        # With a version a module has a srcversion of its own.
        for name in gpu.NAMES:
            with (tree / f"{name}.c").open("a") as file:
                file.write(f'MODULE_VERSION("{version}");\n')
        named = {"Package": "nvidia-kernel-open-dkms", "Version": revised}
        repository.dkms_deb(pool, "nvidia", version, tree, CONF, named)
        programs = Path(folder) / "programs"
        _program(programs, "nvidia-smi", SMI.replace("VERSION", version))
        repository.deb(pool, {"Package": "nvidia-driver-cuda", "Version": revised}, programs)
        _service(pool, Path(folder), "nvidia-persistenced", "nvidia-persistenced", "/dev", revised)
        _service(pool, Path(folder), "nvidia-fabricmanager", "nv-fabricmanager", NVSWITCH, revised)
    depends = ", ".join(f"{name} (>= {revised})" for name in ("nvidia-kernel-open-dkms", "nvidia-driver-cuda"))
    repository.deb(pool, {"Package": "nvidia-open", "Version": revised, "Depends": depends})


def _program(root: Path, name: str, text: str) -> None:
    file = root / "usr/bin" / name
    file.parent.mkdir(parents=True)
    file.write_text(text)
    file.chmod(0o755)


def _service(pool: Path, work: Path, name: str, program: str, device: str, version: str) -> None:
    root = work / name
    _program(root, program, DAEMON)
    unit = root / "lib/systemd/system" / f"{name}.service"
    unit.parent.mkdir(parents=True)
    unit.write_text(UNIT.replace("NAME", name).replace("DEVICE", device).replace("PROGRAM", program))
    repository.deb(pool, {"Package": name, "Version": version}, root, {"postinst": POSTINST})
