"""Kernel arguments, sysctls and the initramfs. grubby's commands were not run on RHEL."""

from pathlib import Path
from typing import Any

import pytest
from pyinfra.api.exceptions import DeployError

from agent.spec.node import HugepagePool, from_mapping
from tasks import reboot
from tasks.common.commands import script
from tasks.common.texts import HEADER
from tasks.host import boot, sysctls
from tasks.host.boot import Initramfs, KernelArguments
from tasks.host.kernel_arguments import missing_arguments
from tasks.host.sysctls import LaterSettings, SysctlValues
from tasks.reboot import NodeRebootRequests
from tests.deploy.conftest import DEBIAN, ROCKY_9, Answers, Node, file_answers, of
from tests.deploy.scripts import sh
from tests.deploy.test_reboot import Turns
from tests.stand_ins import text_file

ARGUMENTS = of(KernelArguments)
REQUESTS = of(NodeRebootRequests)
VALUES = of(SysctlValues)
INITRAMFS = of(Initramfs)
RUNNING = "running root=/dev/vda1 ro quiet"
GRUB = {ARGUMENTS: [RUNNING, "loader grub", "next root=/dev/vda1 ro quiet", "ours "], REQUESTS: ["boot-1"]}
GRUBBY = {ARGUMENTS: [RUNNING, "loader grubby", "next ro quiet pci=realloc", "ours pci=realloc"], REQUESTS: ["boot-1"]}
FORGOTTEN = f"rm -f {reboot.FOLDER}/boot-former"


SYSCTLS = {"net.core.somaxconn": "4096", "vm.overcommit_kbytes": "4096"}


def configure() -> None:
    boot.configure(spec=from_mapping({"node_name": "node-a", "sysctls": SYSCTLS}, "node-a"))


def commands(node: Node, answers: Answers, following: str | None = None, **given: Any) -> list[str]:
    """What a deploy does. ``following``: the arguments of the next boot after it; None: those that it wants."""
    node.data = {"boot": given}
    before = answers[ARGUMENTS]
    after = f"next {' '.join(given.get('arguments', ())) if following is None else following}"
    readings = Turns([before, before, [*(line for line in before if not line.startswith("next")), after]])
    result = node.deploy(configure, {**answers, ARGUMENTS: readings})
    return result.commands["Boot | Kernel arguments"]


def reason(task: str, arguments: str) -> str:
    return f"kernel arguments {arguments} are {'not' if task == 'boot' else 'still'} in effect"


def record(task: str, arguments: str) -> str:
    return str(script(reboot._REQUEST, reboot.FOLDER, task, reason(task, arguments)))


def requested(boot_id: str, arguments: str) -> list[str]:
    return [boot_id, f"boot-former boot-1 {reason('boot-former', arguments)} "]


def test_without_the_key_nothing_changes(node: Node) -> None:
    assert node.deploy(configure, {**GRUB, INITRAMFS: ["/boot/initrd.img-1 1 1 sum"]}).did_nothing


def test_new_arguments_are_written_and_request_a_reboot(node: Node) -> None:
    assert commands(node, GRUB, arguments=["iommu=pt", "pci=realloc"]) == [
        by_grub("iommu=pt pci=realloc"),
        record("boot", "iommu=pt pci=realloc"),
    ]


def by_grub(arguments: str) -> str:
    return str(script(boot._GRUB, boot.DROP_IN, arguments, HEADER.strip(), boot.GRUB_PENDING))


def test_nothing_is_done_if_the_arguments_are_in_effect(node: Node) -> None:
    there = [f"{RUNNING} iommu=pt", "loader grub", "next ro quiet iommu=pt", "ours iommu=pt"]
    assert commands(node, {ARGUMENTS: there, REQUESTS: ["boot-1"]}, arguments=["iommu=pt"]) == []
    kept = {ARGUMENTS: there, REQUESTS: ["boot-2", f"boot boot-1 {reason('boot', 'iommu=pt')} "]}
    assert commands(node, kept, arguments=["iommu=pt"]) == ["rm -f /var/lib/trackbed/reboots/boot"]


@pytest.mark.parametrize(
    ("loader", "following", "problem"),
    [
        (
            "grub",
            "ro quiet",
            f"a file after {boot.DROP_IN}, or /etc/grub.d, replaces GRUB_CMDLINE_LINUX_DEFAULT; change",
        ),
        ("grubby", "ro xiommu=pt iommu=pt.", "grubby did not set it; set it by hand"),
        ("grubby", "ro iommu=pt iommu=nopt", "the kernel takes iommu=nopt instead; remove that (/etc/default/grub,"),
        # A host without an installed kernel has no entries.
        ("grub", "", ""),
    ],
)
def test_an_argument_that_the_next_boot_will_not_have_is_an_error(
    node: Node, loader: str, following: str, problem: str
) -> None:
    there = {ARGUMENTS: [RUNNING, f"loader {loader}", "next ro quiet", "ours "], REQUESTS: ["boot-1"]}
    _, last = commands(node, there, following, arguments=["iommu=pt"])
    begin = f"refuse: kernel argument iommu=pt is not in effect at the next boot, which has {following}: {problem}"
    assert last.startswith(begin if problem else record("boot", "iommu=pt"))


@pytest.mark.parametrize(
    ("there", "wanted"),
    [
        ([f"{RUNNING} iommu=pt", "loader grub", "next ro quiet", "ours iommu=pt"], "iommu=pt"),
        ([RUNNING, "loader grub", "next ro quiet iommu=pt", "ours ", "pending yes"], ""),
    ],
    ids=["out of date", "a change that failed"],
)
def test_a_boot_menu_that_is_not_as_its_file_is_made_again(node: Node, there: list[str], wanted: str) -> None:
    made = commands(node, {ARGUMENTS: there, REQUESTS: ["boot-1"]}, arguments=wanted.split())
    assert made == [by_grub(wanted)]


def test_arguments_that_are_no_longer_wanted_are_removed(node: Node) -> None:
    there = [f"{RUNNING} iommu=pt", "loader grub", "next ro quiet iommu=pt", "ours iommu=pt"]
    # The request first: after an interruption in between, the next deploy would find nothing to remove.
    assert commands(node, {ARGUMENTS: there, REQUESTS: ["boot-1"]}) == [
        record("boot-former", "iommu=pt"),
        by_grub(""),
    ]
    assert commands(node, {**GRUB, REQUESTS: requested("boot-2", "iommu=pt")}) == [FORGOTTEN]


def test_a_pool_of_huge_pages_is_removed_as_a_whole(node: Node) -> None:
    pool = "hugepagesz=1G hugepages=8"
    there = [f"{RUNNING} {pool}", "loader grubby", f"next ro quiet {pool}", f"ours {pool}"]
    assert commands(node, {ARGUMENTS: there, REQUESTS: ["boot-1"]}) == [
        record("boot-former", pool),
        str(script(boot._GRUBBY, boot.GRUBBY_STATE, "", pool)),
    ]


def test_an_argument_that_is_wanted_again_in_the_same_boot_requests_no_reboot(node: Node) -> None:
    there = [f"{RUNNING} iommu=pt pci=realloc", "loader grub", "next root=/dev/vda1 ro quiet", "ours "]
    for before, done in (("iommu=pt", FORGOTTEN), ("iommu=pt pci=realloc", record("boot-former", "pci=realloc"))):
        answers = {ARGUMENTS: there, REQUESTS: requested("boot-1", before)}
        assert commands(node, answers, arguments=["iommu=pt"])[0] == done


def test_a_removal_that_update_grub_did_not_complete_before_a_reboot_requests_another(node: Node) -> None:
    node.data = {"reboot": {"policy": "allow"}}
    there = [f"{RUNNING} iommu=pt", "loader grub", "next root=/dev/vda1 ro quiet iommu=pt", "ours ", "pending yes"]
    now = requested("boot-2", "iommu=pt")
    answers = {ARGUMENTS: there, REQUESTS: now}
    readings = Turns([now, now, ["boot-2"]])
    result = node.deploy(configure, {**DEBIAN, **answers}, {**DEBIAN, **answers, REQUESTS: readings})
    assert not result.failed
    assert result.commands["Boot | Kernel arguments"] == [
        FORGOTTEN,
        record("boot-former", "iommu=pt"),
        by_grub(""),
    ]


def test_arguments_that_are_removed_one_after_the_other_are_all_named(node: Node) -> None:
    there = [f"{RUNNING} iommu=pt pci=realloc", "loader grub", "next root=/dev/vda1 ro quiet iommu=pt", "ours iommu=pt"]
    answers = {ARGUMENTS: there, REQUESTS: requested("boot-1", "pci=realloc")}
    assert commands(node, answers)[0] == record("boot-former", "pci=realloc iommu=pt")


def test_on_rhel_grubby_sets_the_arguments(node: Node) -> None:
    assert commands(node, GRUBBY, arguments=["iommu=pt", "isolcpus=managed_irq,domain,2-7"]) == [
        str(script(boot._GRUBBY, boot.GRUBBY_STATE, "iommu=pt isolcpus=managed_irq,domain,2-7", "pci=realloc")),
        record("boot", "iommu=pt isolcpus=managed_irq,domain,2-7"),
    ]


def test_several_values_of_an_argument_are_refused_with_grubby(node: Node) -> None:
    two = ["console=ttyS0", "iommu=pt", "console=tty0"]
    node.data = {"boot": {"arguments": two}}
    assert "boot.arguments: console is given" in node.deploy(configure, {**ROCKY_9, **GRUBBY}).refusal
    assert commands(node, {**DEBIAN, **GRUB}, arguments=two)[0] == by_grub("console=ttyS0 iommu=pt console=tty0")


def test_a_list_of_devices_is_refused_with_grubby(node: Node) -> None:
    node.data = {"boot": {"arguments": ["pci=disable_acs_redir=0000:18:00.0;0000:3b:00.0"]}}
    assert "0000:18:00.0;0000:3b:00.0 has ';'" in node.deploy(configure, {**ROCKY_9, **GRUBBY}).refusal


def test_grubby_reserves_only_the_largest_page_size(node: Node) -> None:
    given = {"hugepages": [{"size": "1G", "count": 8}, {"size": "2M", "count": 512}]}

    def with_pages() -> None:
        boot.configure(spec=from_mapping({"node_name": "node-a", **given}, "node-a"))

    node.data = {"boot": {"hugepages": True}}
    command = node.deploy(with_pages, {**ROCKY_9, **GRUBBY}).commands["Boot | Kernel arguments"][0]
    assert command == str(script(boot._GRUBBY, boot.GRUBBY_STATE, "hugepagesz=1G hugepages=8", "pci=realloc"))
    command = node.deploy(with_pages, {**DEBIAN, **GRUB}).commands["Boot | Kernel arguments"][0]
    assert " 'hugepagesz=2M hugepages=512 hugepagesz=1G hugepages=8' " in command


def test_a_host_without_a_boot_loader_is_refused_unless_it_has_the_arguments(node: Node) -> None:
    (message,) = commands(node, {ARGUMENTS: [RUNNING], REQUESTS: ["boot-1"]}, arguments=["iommu=pt", "quiet"])
    assert message.startswith(f"refuse: {reason('boot', 'iommu=pt')}, ") and "by neither GRUB" in message
    assert commands(node, {ARGUMENTS: [RUNNING], REQUESTS: ["boot-1"]}, arguments=["quiet"]) == []


def test_huge_pages_become_kernel_arguments() -> None:
    pools = (HugepagePool("2M", 512), HugepagePool("1G", 4, 1), HugepagePool("1G", 8, 0))
    assert boot.hugepage_arguments(pools) == ("hugepagesz=2M hugepages=512", "hugepagesz=1G hugepages=0:8,1:4")
    running = "ro hugepagesz=1G hugepages=512 hugepagesz=2M hugepages=512"
    assert missing_arguments(boot.hugepage_arguments(pools), running) == ["hugepagesz=1G hugepages=0:8,1:4"]


def test_sysctls_are_written_and_loaded_now(node: Node) -> None:
    node.data = {"boot": {"sysctls": {"vm.min_free_kbytes": "65536", "net.ipv4.tcp_rmem": "4096  87380 16777216"}}}
    text = f"{HEADER}net.ipv4.tcp_rmem = 4096  87380 16777216\nvm.min_free_kbytes = 65536\n"
    loaded = str(script(sysctls._LOAD, sysctls.PATH))
    result = node.deploy(configure, GRUB)
    assert result.uploads == {sysctls.PATH: text.encode()}
    assert result.commands["Boot | Sysctls now"] == [loaded]
    values = ["/proc/sys/vm/min_free_kbytes 65536", "/proc/sys/net/ipv4/tcp_rmem 4096\t87380\t16777216"]
    there = {**GRUB, **file_answers(sysctls.PATH, text)}
    assert node.deploy(configure, {**there, VALUES: values}).flat == []
    other = [values[0], "/proc/sys/net/ipv4/tcp_rmem 1 2 3"]
    first, second = node.deploy(configure, {**there, VALUES: other}).flat
    assert first == loaded
    assert second.startswith("refuse: boot.sysctls: ") and "net.ipv4.tcp_rmem is 1 2 3," in second


def test_a_sysctl_that_the_kernel_does_not_have_is_a_warning(node: Node) -> None:
    """systemd-sysctl ignores it, so there is nothing to load again."""
    name = "net.bridge.bridge-nf-call-iptables"
    node.data = {"boot": {"sysctls": {name: "1"}}}
    result = node.deploy(configure, {**GRUB, **file_answers(sysctls.PATH, f"{HEADER}{name} = 1\n")})
    assert result.did_nothing
    assert [line for line in result.log if f"boot.sysctls: the kernel does not have {name}; load the module" in line]


LATER = of(LaterSettings)


A, B = ("95-a.conf /run/sysctl.d/95-a.conf vm", "99-b.conf /etc/sysctl.d/99-b.conf vm")


@pytest.mark.parametrize(
    ("name", "later", "refused"),
    [
        ("swappiness", [f"{B}.swappiness = 10"], "to 10, not 0;"),
        pytest.param("swappiness", [f"{A}/swappiness=0", f"{B}.swappiness=10"], "to 10, not 0;", id="community-2"),
        ("swappiness", [f"{A}.swappiness=10", f"{B}.swappiness=0"], ""),
        ("swappiness", [f"{B}.*=10", f"{B}.dirty_ratio=10"], ""),
        # The kernel sets vm.dirty_ratio to 0 when vm.dirty_bytes is written.
        ("dirty_ratio", [f"{B}.dirty_ratio = 5", f"{B}.dirty_bytes = 4096"], "to 0, not 5; remove vm.dirty_bytes"),
        ("dirty_ratio", [f"{B}.dirty_bytes = 4096", f"{B}.dirty_ratio = 5"], ""),
    ],
)
def test_a_file_that_sets_another_value_at_boot_is_named(node: Node, name: str, later: list[str], refused: str) -> None:
    value = {"swappiness": "0", "dirty_ratio": "5"}[name]
    node.data = {"boot": {"sysctls": {f"vm.{name}": value}}}
    there = file_answers(sysctls.PATH, f"{HEADER}vm.{name} = {value}\n")
    result = node.deploy(configure, {LATER: later, **GRUB, **there, VALUES: [f"/proc/sys/vm/{name} {value}"]})
    assert (result.failed, len(result.flat)) == (bool(refused), bool(refused))
    assert all(later[-1].split()[1] in said and f"vm.{name} {refused}" in said for said in result.flat)


def test_all_values_that_later_files_override_are_named_at_once(node: Node) -> None:
    node.data = {"boot": {"sysctls": {"vm.swappiness": "0", "vm.dirty_ratio": "5"}}}
    there = file_answers(sysctls.PATH, f"{HEADER}vm.dirty_ratio = 5\nvm.swappiness = 0\n")
    later = [f"99-{name}.conf /etc/sysctl.d/99-{name}.conf vm.{name} = 10" for name in ("dirty_ratio", "swappiness")]
    values = ["/proc/sys/vm/swappiness 0", "/proc/sys/vm/dirty_ratio 5"]
    result = node.deploy(configure, {LATER: later, **GRUB, **there, VALUES: values})
    assert result.failed
    assert [name for name in ("vm.dirty_ratio to 10", "vm.swappiness to 10") if name not in "".join(result.log)] == []


def test_the_files_that_a_boot_reads_later_are_found(tmp_path: Path) -> None:
    for name, text in {
        "etc/sysctl.d/10-early.conf": "vm.swappiness = 60\n",
        "etc/sysctl.d/90-trackbed.conf": "vm.swappiness = 0\n",
        "etc/sysctl.d/99-b, c.conf": "vm.swappiness = 1\n",
        "etc/sysctl.d/99-b,c.conf": "# vm.swappiness = 2\n; vm.swappiness = 3\n -vm.swappiness=4\nnonsense\n",
        "usr/lib/sysctl.d/99-b,c.conf": "vm.swappiness = 5\n",
        "usr/lib/sysctl.d/95-a.conf": "net/core/somaxconn = 1 = 2\nnet.ipv4.conf.*.rp_filter = 2\n",
    }.items():
        text_file(tmp_path / name, text)
    (tmp_path / "etc/sysctl.d/91-folder.conf").mkdir()
    (tmp_path / "etc/sysctl.d/92-masked.conf").symlink_to("/dev/null")
    (tmp_path / "usr/lib/sysctl.d/92-masked.conf").write_text("vm.swappiness = 6\n")
    found = sysctls.LaterSettings().process(sh(sysctls._LATER, "90-trackbed.conf", tmp_path))
    assert found == [
        sysctls.Setting("/usr/lib/sysctl.d/95-a.conf", "net/core/somaxconn", "1 = 2"),
        sysctls.Setting("/etc/sysctl.d/99-b,c.conf", "vm.swappiness", "4"),
    ]


def test_a_later_file_may_set_the_variable_by_its_other_name() -> None:
    later = [sysctls.Setting("/etc/sysctl.d/99-k.conf", "net/nf_conntrack_max", "2")]
    assert sysctls._overridden({"net.netfilter.nf_conntrack_max": "2"}, later) == {}
    [name] = sysctls._overridden({"net.netfilter.nf_conntrack_max": "1"}, later)
    assert name == "net.netfilter.nf_conntrack_max"


def test_a_sysctl_in_another_notation_is_not_loaded_again(node: Node) -> None:
    node.data = {"boot": {"sysctls": {"net.ipv4.tcp_fastopen": "0x403"}}}
    there = file_answers(sysctls.PATH, f"{HEADER}net.ipv4.tcp_fastopen = 0x403\n")
    result = node.deploy(configure, {**GRUB, **there, VALUES: ["/proc/sys/net/ipv4/tcp_fastopen 1027"]})
    assert result.flat == []


def test_new_options_of_a_module_in_the_initramfs_rebuild_it(node: Node) -> None:
    node.data = {"kernel_module_options": {"ib_core": {"netns_mode": "N"}}}
    before = "/boot/initrd.img-6.1 100 1 sum"
    files = ("/etc/modprobe.d/trackbed.conf", boot.INITRAMFS_STATE, "/boot/initrd.img-6.1")
    request = (reboot.FOLDER, "initramfs", "options of modules in /boot/initrd.img-6.1 have changed")
    result = node.deploy(configure, {**GRUB, INITRAMFS: [before]})
    assert result.commands["Boot | Initramfs"] == [str(script(boot._UPDATE_INITRAMFS, *files, *request, "ib_core"))]
    result = node.deploy(configure, {**GRUB, INITRAMFS: [before, before]})
    assert result.commands["Boot | Initramfs"] == []


def test_an_unknown_key_that_is_no_text_is_refused(node: Node) -> None:
    known = "known keys: arguments, hugepages, sysctls"
    with pytest.raises(DeployError, match=f"unknown key 1; {known}; unknown key 'argument'"):
        node.deploy(configure, GRUB, boot={1: [], "argument": []})
