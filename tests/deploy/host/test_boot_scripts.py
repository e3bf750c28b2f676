"""The scripts for kernel arguments and the initramfs: these tests run them in a temporary folder."""

import os
from pathlib import Path

import pytest

from tasks.host import boot
from tests.deploy.scripts import sh
from tests.stand_ins import program, text_file


def arguments(root: Path, path: str) -> boot.Arguments:
    message = sh(boot._ARGUMENTS, root / "drop-in.cfg", root / "state", root, root / "pending", PATH=path)
    return boot.KernelArguments().process(message)


def test_grubs_kernel_arguments_are_read(tmp_path: Path) -> None:
    text_file(tmp_path / "proc/cmdline", "BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro quiet\n")
    path = os.environ["PATH"]
    if not any(Path(folder, name).exists() for folder in path.split(":") for name in ("update-grub", "grubby")):
        assert arguments(tmp_path, path) == boot.Arguments(running="BOOT_IMAGE=/vmlinuz root=/dev/sda1 ro quiet")
    program(tmp_path / "bin" / "update-grub", "echo made")
    path = f"{tmp_path}/bin:{path}"
    # No menu was ever written.
    assert (arguments(tmp_path, path).loader, arguments(tmp_path, path).next) == ("grub", "")
    entry = "\tlinux\t/boot/vmlinuz root=/dev/sda1 ro quiet iommu=pt pci=realloc\n"
    text_file(tmp_path / "boot/grub/grub.cfg", f"menuentry {{\n{entry}}}\n\tlinux /boot/vmlinuz single\n")
    pending = tmp_path / "pending"
    sh(boot._GRUB, tmp_path / "drop-in.cfg", "iommu=pt pci=realloc", "# ours", pending, PATH=path)
    assert not pending.exists()
    assert (tmp_path / "drop-in.cfg").read_text() == (
        '# ours\nGRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT iommu=pt pci=realloc"\n'
    )
    made = arguments(tmp_path, path)
    assert (made.loader, made.next, made.ours, made.pending) == (
        "grub", "root=/dev/sda1 ro quiet iommu=pt pci=realloc", "iommu=pt pci=realloc", "",
    )  # fmt: skip
    program(tmp_path / "bin/update-grub", "echo 'no space'; exit 1")
    with pytest.raises(AssertionError, match="no space"):
        sh(boot._GRUB, tmp_path / "drop-in.cfg", "", "# ours", pending, PATH=path)
    assert not (tmp_path / "drop-in.cfg").exists()
    # The menu still has them, and nothing but this tells the next deploy.
    assert (arguments(tmp_path, path).ours, arguments(tmp_path, path).pending) == ("", "yes")


def test_grub_gets_a_semicolon_in_quotation_marks(tmp_path: Path) -> None:
    """Without them it ends the command: grub-script-check refuses `linux /vmlinuz a=1;fi`, and takes `'a=1;fi'`."""
    text_file(tmp_path / "proc/cmdline", "ro\n")
    drop_in, menu = tmp_path / "drop-in.cfg", tmp_path / "boot/grub/grub.cfg"
    menu.parent.mkdir(parents=True)
    # As grub-mkconfig does: it sources the drop-in, and 10_linux writes the arguments as they are.
    made = """printf '\\tlinux\\t/boot/vmlinuz ro %s\\n' "$GRUB_CMDLINE_LINUX_DEFAULT" >"""
    program(tmp_path / "bin/update-grub", f"GRUB_CMDLINE_LINUX_DEFAULT=quiet; . {drop_in}; {made} {menu}")
    path, wanted = (
        f"{tmp_path}/bin:{os.environ['PATH']}",
        "iommu=pt pci=disable_acs_redir=0000:18:00.0;0000:3b:00.0 a=1",
    )
    sh(boot._GRUB, drop_in, wanted, "# ours", tmp_path / "pending", PATH=path)
    quoted = "iommu=pt 'pci=disable_acs_redir=0000:18:00.0;0000:3b:00.0' a=1"
    assert menu.read_text() == f"\tlinux\t/boot/vmlinuz ro quiet {quoted}\n"
    assert (arguments(tmp_path, path).next, arguments(tmp_path, path).ours) == (f"ro quiet {wanted}", wanted)
    menu.write_text(f'\tlinux\t/boot/vmlinuz ro "b=1;2" {wanted}\n')
    assert arguments(tmp_path, path).next == 'ro "b=1;2" iommu=pt pci=disable_acs_redir=0000:18:00.0'


def test_grubbys_kernel_arguments_are_read(tmp_path: Path) -> None:
    text_file(tmp_path / "proc/cmdline", "root=/dev/sda1 ro\n")
    program(
        tmp_path / "bin" / "grubby",
        f'if [ "$1" = --info=DEFAULT ]; then echo \'args="ro quiet iommu=pt"\'; else echo "$*" >> {tmp_path}/did; fi',
    )
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    sh(boot._GRUBBY, tmp_path / "state", "iommu=pt", "pci=realloc isolcpus=1", PATH=path)
    assert (tmp_path / "did").read_text().splitlines() == [
        "--update-kernel=ALL --remove-args=pci=realloc isolcpus=1",
        "--update-kernel=ALL --args=iommu=pt",
    ]
    made = arguments(tmp_path, path)
    assert made == boot.Arguments("grubby", "root=/dev/sda1 ro", "ro quiet iommu=pt", "iommu=pt")
    program(tmp_path / "bin/killed/grubby", "kill -9 $PPID")
    with pytest.raises(AssertionError):
        sh(boot._GRUBBY, tmp_path / "state", "iommu=pt mmu=on", "pci=realloc", PATH=f"{tmp_path}/bin/killed:{path}")
    assert (tmp_path / "state").read_text() == "iommu=pt mmu=on pci=realloc\n"


def initramfs(root: Path) -> tuple[str, str] | None:
    message = sh(boot._INITRAMFS, root / "modprobe.d/trackbed.conf", root / "state", root)
    return boot.Initramfs().process(message)


def test_a_deploy_that_is_killed_after_it_has_made_the_initramfs_has_requested_the_reboot(tmp_path: Path) -> None:
    """The next one finds an image that is newer than the options, and so requests nothing."""
    image, options = tmp_path / "image", tmp_path / "options"
    image.touch()
    os.utime(image, (1, 1))
    options.write_text("options ib-core netns_mode=N\n")
    program(tmp_path / "bin" / "lsinitramfs", "echo kernel/drivers/infiniband/core/ib_core.ko.xz")
    program(tmp_path / "bin" / "update-initramfs", f'touch {image}; kill -9 "$PPID"')
    given = (options, tmp_path / "state", image, tmp_path / "reboots", "initramfs", "options have changed", "ib-core")
    with pytest.raises(AssertionError):
        sh(boot._UPDATE_INITRAMFS, *given, programs=tmp_path / "bin")
    assert image.stat().st_mtime > options.stat().st_mtime - 1
    assert (tmp_path / "reboots/initramfs").read_text().splitlines()[1:] == ["options have changed"]


@pytest.mark.parametrize(
    ("module", "file"),
    [
        pytest.param("ib-core", "infiniband/core/ib_core.ko.xz", id="ib_core"),
        pytest.param("mlx4_core", "net/ethernet/mellanox/mlx4/mlx4_core.ko", id="xcp-544"),
    ],
)
def test_an_initramfs_is_made_again_if_it_has_the_module(tmp_path: Path, module: str, file: str) -> None:
    assert initramfs(tmp_path) is None
    image = tmp_path / "boot" / f"initrd.img-{os.uname().release}"
    text_file(image, "one")
    os.utime(image, (1, 1))
    options = tmp_path / "modprobe.d/trackbed.conf"
    text_file(options, "options erdma compat_mode=Y\n")
    program(tmp_path / "bin" / "lsinitramfs", f"echo usr/lib/modules/6.1/kernel/drivers/{file}")
    program(tmp_path / "bin" / "update-initramfs", f"echo again >> {image}")

    def look(*modules: str) -> None:
        given = (options, tmp_path / "state", image, tmp_path / "reboots", "initramfs", "options have changed")
        sh(boot._UPDATE_INITRAMFS, *given, *modules, programs=tmp_path / "bin")
        have = initramfs(tmp_path)
        assert have is not None
        assert have[0] == have[1]

    look("erdma")
    assert image.read_text() == "one"
    assert not (tmp_path / "reboots").exists()
    options.write_text(f"options {module} a=N\n")
    have = initramfs(tmp_path)
    assert have is not None
    assert have[0] != have[1]
    look(module)
    assert image.read_text() == "oneagain\n"
    assert (tmp_path / "reboots/initramfs").read_text().splitlines()[1:] == ["options have changed"]
    # It is newer than the options now.
    look("ib-core")
    assert image.read_text() == "oneagain\n"


def test_options_that_are_again_those_of_this_boot_need_no_reboot(tmp_path: Path) -> None:
    image, options, request = tmp_path / "image", tmp_path / "options", tmp_path / "reboots/initramfs"
    image.touch()
    program(tmp_path / "bin" / "lsinitramfs", "echo kernel/drivers/infiniband/core/ib_core.ko.xz")
    program(tmp_path / "bin" / "update-initramfs", f"touch {image}")

    def change(text: str | None, of: Path = image) -> bool:
        if text is None:
            options.unlink()
        else:
            options.write_text(text)
        os.utime(of, (1, 1))
        given = (options, tmp_path / "state", of, tmp_path / "reboots", "initramfs", "changed", "ib-core")
        sh(boot._UPDATE_INITRAMFS, *given, programs=tmp_path / "bin")
        return request.exists()

    def reboot_host() -> None:
        kept = tmp_path / "state.boot"
        kept.write_text(f"of-an-earlier-boot {kept.read_text().split(' ', 1)[1]}")
        request.unlink(missing_ok=True)

    assert change("options ib-core a=N\n")
    assert not change(None)
    assert change("options ib-core a=N\n")
    assert change("options ib-core a=Y\n")
    reboot_host()
    assert change("options ib-core a=N\n")
    assert not change("options ib-core a=Y\n")
    assert change(None)
    reboot_host()
    # The image of another kernel may have been made with other options.
    other = tmp_path / "other"
    other.touch()
    assert change("options ib-core a=N\n", other)
    assert change(None, other)
