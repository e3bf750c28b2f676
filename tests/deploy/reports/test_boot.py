"""Public reports of what a boot takes from where: kernel arguments by GRUB and grubby, sysctls by systemd.

The scripts run for real, in a folder of their own, with programs that stand in for those of a node. grubby was not run.
"""

from pathlib import Path
from typing import Any

import pytest

from agent.spec.node import HugepagePool, from_mapping
from tasks.common.commands import script
from tasks.host import boot, kubelet_states, sysctls
from tasks.host.kernel_arguments import missing_arguments, rival
from tests.deploy.conftest import DEBIAN, ROCKY_9, Node, of
from tests.deploy.host.test_boot import ARGUMENTS, REQUESTS, commands
from tests.deploy.scripts import sh
from tests.stand_ins import program, text_file

RANGES = "16G-4096G:512M,4096G-16384G:1G"
SIZE = "default_hugepagesz=1G"
OURS = boot.DROP_IN.rpartition("/")[2]


def set_by_grub(root: Path, other: str) -> str:
    """What GRUB's menu has after a deploy, on an image with a file of its own that sets the arguments."""
    folder, menu = root / "grub.d", root / "boot/grub/grub.cfg"
    menu.parent.mkdir(parents=True)
    text_file(folder / other, 'GRUB_CMDLINE_LINUX_DEFAULT="console=ttyS0"\n')
    made = f"""printf '\\tlinux\\t/boot/vmlinuz ro %s\\n' "$GRUB_CMDLINE_LINUX_DEFAULT" > {menu}"""
    program(root / "bin/update-grub", f'for file in {folder}/*.cfg; do . "$file"; done; {made}')
    sh(boot._GRUB, folder / OURS, "iommu=pt", "# ours", root / "pending", programs=root / "bin", LC_ALL="C")
    return menu.read_text()


@pytest.mark.parametrize(
    "other",
    [
        pytest.param("50-cloudimg-settings.cfg", id="ansible-collection-linux-29"),
        pytest.param("10_settings.cfg", id="image-builder-1483"),
    ],
)
def test_an_image_s_own_arguments_do_not_replace_ours(tmp_path: Path, other: str) -> None:
    assert set_by_grub(tmp_path, other) == "\tlinux\t/boot/vmlinuz ro console=ttyS0 iommu=pt\n"


def test_a_file_that_replaces_our_arguments_is_an_error(node: Node, tmp_path: Path) -> None:
    """Hetzner's images have one."""
    following = set_by_grub(tmp_path, "hetzner.cfg").removeprefix("\tlinux\t/boot/vmlinuz ").strip()
    there = {ARGUMENTS: ["running ro", "loader grub", "next ro", "ours "], REQUESTS: ["boot-1"]}
    assert "replaces GRUB_CMDLINE_LINUX_DEFAULT" in commands(node, there, following, arguments=["iommu=pt"])[-1]


@pytest.mark.parametrize(
    ("file", "others", "wanted", "other"),
    [
        pytest.param("kdump-tools", "crashkernel=192M", "crashkernel=1G", "crashkernel=192M", id="chef-bcpc-998"),
        ("10_image", "crashkernel=192M", "crashkernel=1G", ""),
        pytest.param("zz", "crashkernel=1G,high", "crashkernel=128M,low", "", id="harvester-installer-149"),
        pytest.param("10_image", "isolcpus=2-27", "isolcpus=2-27,30-55", "isolcpus=2-27", id="cnf-testbed-131"),
        ("10_image", "isolcpus=2-7", "isolcpus=2-7", ""),
        pytest.param("zz", "console=tty0 pci=nommconf", "console=ttyS0 pci=realloc", "", id="ursula-900"),
        ("zz", "intel_iommu=sm_on iommu=nopt", "intel_iommu=on iommu=pt", "iommu=nopt"),
        ("10_image", "intel_iommu=off iommu=nopt", "intel_iommu=on iommu=pt", ""),
        pytest.param("zz", "iommu.passthrough=0", "iommu=pt", "iommu.passthrough=0", id="nix-amd-ai-49"),
        pytest.param("10_image", "iommu=off", "iommu=pt intel_iommu=on", "iommu=off", id="lsirec-13"),
        ("zz", "intel_iommu=off", "intel_iommu=on,sm_on", "intel_iommu=off"),
        ("zz", "intel_iommu=sm_on", "intel_iommu=on", ""),
        pytest.param("zz", "pci=realloc=off", "pci=realloc", "pci=realloc=off", id="media-delivery-122"),
        ("10_image", "pci=nommconf,realloc", "pci=realloc,noaer", ""),
        ("zz", "pci=pcie_bus_safe", "pci=pcie_bus_perf", "pci=pcie_bus_safe"),
        ("zz", "pci=disable_acs_redir=1:0.0", "pci=disable_acs_redir=0:1.0", "pci=disable_acs_redir=1:0.0"),
        pytest.param(
            "10_image", f"crashkernel={RANGES}", "crashkernel=1G,high", f"crashkernel={RANGES}", id="sap-hana-431"
        ),
        ("10_image", "audit=0", "audit=1", "audit=0"),
        ("zz", "audit=1", "audit=0", ""),
        pytest.param("10_image", "isolcpus=domain,2-7", "isolcpus=managed_irq,domain,2-7", "", id="tuned-356"),
        ("10_image", "isolcpus=managed_irq,2-5", "isolcpus=2-7", ""),
        ("10_image", "nohz_full=2-5", "isolcpus=nohz,domain,2-7", "nohz_full=2-5"),
        ("zz", "nohz_full=2-5 rcu_nocbs=2-5", "nohz_full=2-7 rcu_nocbs=2-7", "rcu_nocbs=2-5"),
        ("10_image", "hugepagesz=1G hugepages=2", "hugepagesz=1G hugepages=8", "hugepagesz=1G hugepages=2"),
        ("zz", "hugepagesz=1024M hugepages=2 hugepages=4", "hugepagesz=1G hugepages=8", ""),
        ("10_image", "hugepagesz=2M hugepages=2", "hugepagesz=1G hugepages=8", ""),
        pytest.param("10_image", "hugepages=256", "hugepagesz=2M hugepages=512", "hugepages=256", id="vyos-1x-4491"),
        ("10_image", "hugepages=256", "hugepagesz=1G hugepages=8", ""),
        ("10_image", "hugepages=8 default_hugepagesz=1G", "hugepagesz=1G hugepages=4", "hugepages=8"),
        pytest.param("10_image", "default_hugepagesz=1G", "hugepagesz=1G hugepages=8", "", id="cloud-hypervisor-2579"),
        ("10_image", f"{SIZE} hugepages=4", "hugepagesz=1G hugepages=8", f"{SIZE} hugepages=4"),
        ("zz", f"hugepagesz=2M hugepages=2 {SIZE} hugepages=4 default_hugepagesz=2M", "hugepagesz=1G hugepages=8", ""),
        pytest.param(
            *("10_image", f"{SIZE} hugepagesz=2M hugepages=0", "hugepagesz=2M hugepages=512"),
            "hugepagesz=2M hugepages=0",
            id="performance-addon-operators-326",
        ),
    ],
)
def test_an_argument_whose_other_value_the_kernel_takes_is_not_taken_for_set(
    file: str, others: str, wanted: str, other: str
) -> None:
    line = f"ro {others} {wanted}" if file == "10_image" else f"ro {wanted} {others}"
    arguments = (wanted,) if "hugepages" in wanted else tuple(wanted.split())
    missing = missing_arguments(arguments, line)
    assert bool(missing) == bool(other)
    assert {rival(each, line) for each in missing} == ({other} if other else set())


def test_arguments_of_init_are_not_those_of_the_kernel() -> None:
    assert missing_arguments(("iommu=pt", "quiet"), "ro quiet -- iommu=pt") == ["iommu=pt"]


@pytest.mark.parametrize(
    "entry", [pytest.param("ro quiet", id="grubby-55"), pytest.param("ro $kernelopts", id="osbuild-composer-2129")]
)
def test_a_new_kernel_s_entry_without_the_arguments_gets_them_by_the_next_deploy(node: Node, entry: str) -> None:
    there = ["running ro quiet iommu=pt", "loader grubby", f"next {entry}", "ours iommu=pt"]
    made = commands(node, {**ROCKY_9, ARGUMENTS: there, REQUESTS: ["boot-1"]}, arguments=["iommu=pt"])
    assert made == [str(script(boot._GRUBBY, boot.GRUBBY_STATE, "iommu=pt", ""))]


@pytest.mark.parametrize(
    "running",
    [
        pytest.param("hugepagesz=1G hugepagesz=2M hugepages=32 hugepages=1024", id="image-factory-154"),
        pytest.param("hugepages=32 hugepagesz=1G hugepages=1024 hugepagesz=2M", id="kubevirtci-15"),
    ],
)
def test_sizes_and_numbers_of_huge_pages_in_another_order_are_not_taken_for_set(running: str) -> None:
    wanted = boot.hugepage_arguments((HugepagePool("1G", 32), HugepagePool("2M", 1024)))
    assert missing_arguments(wanted, running) == list(wanted)
    assert not missing_arguments(wanted, f"ro {' '.join(wanted)} quiet")


@pytest.mark.parametrize(
    ("file", "named"),
    [
        pytest.param("usr/lib/sysctl.d/protect-links.conf", True, id="systemd-20919"),
        pytest.param("etc/sysctl.d/99-sysctl.conf", True, id="skuba-607"),
        pytest.param("etc/sysctl.d/zz-sysrepo.conf", True, id="sysrepo-2558"),
        pytest.param("usr/lib/sysctl.d/50-default.conf", False, id="systemd-12791"),
        pytest.param("usr/lib/sysctl.d/90-trackbed.conf", False, id="void-runit-25"),
        # Debian 13 has no link to it in sysctl.d any more.
        pytest.param("etc/sysctl.conf", False, id="ansible-collection-hardening-905"),
    ],
)
def test_a_file_of_sysctls_that_a_boot_reads_later_is_found(tmp_path: Path, file: str, named: bool) -> None:
    for path, text in {"etc/sysctl.d/90-trackbed.conf": "vm.swappiness = 0\n", file: "vm.swappiness = 60\n"}.items():
        text_file(tmp_path / path, text)
    later = sysctls.LaterSettings().process(sh(sysctls._LATER, "90-trackbed.conf", tmp_path))
    overridden = sysctls._overridden({"vm.swappiness": "0"}, later)
    assert {name: (setting.file, value) for name, (setting, value) in overridden.items()} == (
        {"vm.swappiness": (f"/{file}", "60")} if named else {}
    )


@pytest.mark.parametrize(
    ("programs", "info", "loader"),
    [
        pytest.param(("update-grub", "grubby"), "", "grub", id="bluebanquise-1188"),
        pytest.param(("update-grub",), "systemd-boot 252.5", "", id="i915-sriov-dkms-485"),
        pytest.param(("update-grub",), "systemd-boot 257", "", id="ProxMenux-15"),
        pytest.param(("update-grub",), "systemd-stub 257", "", id="kiwi-2813"),
        pytest.param(("grubby",), "systemd-stub 256", "", id="kdump-utils-100"),
        (("update-grub",), "GRUB 2.12", "grub"),
        (("grubby",), "", "grubby"),
        pytest.param((), "", "", id="fedora-coreos-config-234"),
    ],
)
def test_the_boot_loader_is_the_one_that_boots(
    tmp_path: Path, programs: tuple[str, ...], info: str, loader: str
) -> None:
    variable = "StubInfo" if "stub" in info else "LoaderInfo"
    for name, text in {"proc/cmdline": "ro", f"sys/firmware/efi/efivars/{variable}-4a67b082": info}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"\6\0\0\0" + text.encode("utf-16-le") if "efi" in name else text.encode())
    for name in programs:
        program(tmp_path / "bin" / name, "exit 1")
    said = sh(boot._ARGUMENTS, "/none", "/none", tmp_path, "/none", programs=tmp_path / "bin")
    assert boot.KernelArguments().process(said).loader == loader


@pytest.mark.parametrize(
    ("loader", "variables"),
    [
        pytest.param("grubby", "# GRUB\nkernelopts=root=/dev/vda1 ro\ntuned_params=isolcpus=2-5\n###", id="boom-33"),
        pytest.param(
            "update-grub", '\tset kernelopts="root=/dev/vda1 ro"\nset tuned_params="isolcpus=2-5"', id="tuned-704"
        ),
    ],
)
def test_what_tuned_adds_at_the_boot_is_seen(tmp_path: Path, loader: str, variables: str) -> None:
    entry = "$kernelopts ${tuned_params} isolcpus=2-7 $other"
    for name, text in {
        "proc/cmdline": "ro",
        "boot/grub/grub.cfg": f"{variables}\n\tlinux /vmlinuz {entry}\n",
        "boot/grub2/grubenv": variables,
    }.items():
        text_file(tmp_path / name, text)
    program(tmp_path / "bin" / loader, f"""echo 'args="{entry}"'""")
    said = sh(boot._ARGUMENTS, "/none", "/none", tmp_path, "/none", programs=tmp_path / "bin")
    following = boot.KernelArguments().process(said).next
    assert following == "root=/dev/vda1 ro isolcpus=2-5 isolcpus=2-7 $other"
    assert rival("isolcpus=2-7", following) == "isolcpus=2-5"


PROTECTED = of(sysctls.ProtectedDefaults)
PROTECT, COMPACT = "protectKernelDefaults: true\n", '{"x":1,"protectKernelDefaults":true}'
PRETTY = '{\n  "protectKernelDefaults": true,\n'
OF_EKS = "etc/kubernetes/kubelet"


@pytest.mark.parametrize(
    ("file", "text", "value", "refused"),
    [
        pytest.param("var/lib/kubelet/config.yaml", PROTECT, "0", True, id="bottlerocket-3780"),
        pytest.param("etc/rancher/rke2/config.yaml", 'profile: "cis-1.23"\n', "0", True, id="rke2-3804"),
        pytest.param("etc/kubernetes/kubelet-config.yaml", PROTECT, "0", True, id="kubespray-6611"),
        pytest.param(f"{OF_EKS}/kubelet-config.json", PRETTY, "0", True, id="pulumi-eks-293"),
        pytest.param(f"{OF_EKS}/config.json.d/00-nodeadm.conf", COMPACT, "0", True, id="amazon-eks-ami-1988"),
        pytest.param("var/lib/rancher/k3s/agent/etc/kubelet.conf.d/a.conf", PROTECT, "0", True, id="k3s-docs-433"),
        pytest.param("var/lib/k0s/kubelet-config.yaml", PROTECT, "0", True, id="k0s-681"),
        ("etc/kubernetes/kubelet-config.yaml", f"# {PROTECT}", "0", False),
        ("etc/rancher/k3s/config.yaml.d/a.yaml", "protect-kernel-defaults: true\n", "0", True),
        ("etc/default/kubelet", 'KUBELET_EXTRA_ARGS="--protect-kernel-defaults"\n', "0", True),
        ("etc/systemd/system/k3s.service.d/a.conf", "ExecStart=/x --protect-kernel-defaults=true\n", "0", True),
        ("etc/default/kubelet", "KUBELET_EXTRA_ARGS=--protect-kernel-defaults=false\n", "0", False),
        ("var/lib/kubelet/config.yaml", PROTECT, "1", False),
        ("var/lib/kubelet/config.yaml", "protectKernelDefaults: false\n", "0", False),
    ],
)
def test_a_sysctl_with_which_the_kubelet_would_not_start_is_refused(
    node: Node, tmp_path: Path, file: str, text: str, value: str, refused: bool
) -> None:
    text_file(tmp_path / file, text)
    answers = {
        PROTECTED: sh(sysctls._PROTECTED, tmp_path),
        REQUESTS: ["boot-1"],
        ARGUMENTS: ["running ro", "loader none"],
    }
    spec = from_mapping({"node_name": "node-a", "sysctls": {"vm.overcommit_memory": value}}, "node-a")
    result = node.deploy(lambda: boot.configure(spec=spec), {**DEBIAN, **answers})
    assert any("only with vm.overcommit_memory = 1" in line for line in result.errors) == refused


STATIC = "memoryManagerPolicy: Static\n"
STATIC_CPUS = '{"cpuManagerPolicy":"static","x":1}'
DROP_IN = "etc/systemd/system/kubelet.service.d/a.conf"
REMOVES = {DROP_IN: "[Service]\nExecStartPre=/bin/rm -f /var/lib/kubelet/memory_manager_state\n"}
PAGES = {"hugepages": [{"size": "1G", "count": 32}]}


@pytest.mark.parametrize(
    ("files", "more", "arguments", "warned"),
    [
        pytest.param({"var/lib/kubelet/config.yaml": STATIC}, PAGES, [], "huge pages", id="kubernetes-109996"),
        pytest.param(
            {"var/lib/kubelet/config.yaml": STATIC, **REMOVES}, PAGES, [], "", id="machine-config-operator-2718"
        ),
        pytest.param({f"{OF_EKS}/config.json": STATIC_CPUS}, {}, ["nosmt"], "CPUs", id="kubernetes-110478"),
        ({"etc/rancher/k3s/config.yaml": "kubelet-arg:\n- cpu-manager-policy=static\n"}, PAGES, ["maxcpus=8"], "CPUs"),
        ({"var/lib/kubelet/config.yaml": f"{STATIC}cpuManagerPolicy: none\n"}, {}, ["nosmt"], ""),
        ({"var/lib/kubelet/config.yaml": "memoryManagerPolicy: None\n"}, PAGES, [], ""),
    ],
)
def test_a_kubelet_that_would_not_start_after_a_change_is_named(
    node: Node, tmp_path: Path, files: dict[str, str], more: dict[str, Any], arguments: list[str], warned: str
) -> None:
    for path, text in files.items():
        text_file(tmp_path / path, text)
    running = f"running ro {' '.join(arguments)}"
    states = sh(kubelet_states._STATES, tmp_path)
    answers = {of(kubelet_states.KubeletStates): states, REQUESTS: ["boot-1"], ARGUMENTS: [running, "loader none"]}
    spec = from_mapping({"node_name": "node-a", **more}, "node-a")
    result = node.deploy(lambda: boot.configure(spec=spec), {**DEBIAN, **answers}, boot={"arguments": arguments})
    said = [line for line in result.log if "it does not start until" in line]
    assert [f"after a change of {warned} it" in line for line in said] == ([True] if warned else [])
