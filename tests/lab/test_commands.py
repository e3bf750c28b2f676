"""The commands on a node of the lab: apply beside the service, contention, a spec derived from the node, traffic, bundle."""

import json
import re
from pathlib import Path
from typing import Any

from lab import MACHINES, Node
from tests.lab.conftest import DEADLINE, SPEC, condition, eventually, give, ready, spec, wait_ready

NICS = MACHINES[0].nics
PROLOG = Path(__file__).parents[2] / "examples" / "slurm" / "prolog.sh"


def change_spec(node: Node, **changes: Any) -> None:
    """Give the node its spec with other values at its top."""
    give(node, {**spec(node), **changes})


def fewer_vfs(node: Node, count: int) -> list[Any]:
    """The spec's NICs with another VF count on the first."""
    nics: list[Any] = spec(node)["nics"]
    nics[0]["vfs"]["count"] = count
    return nics


def status(node: Node, kind: str) -> tuple[str, str]:
    """Status and reason of one of the report's conditions."""
    return condition(node, kind).get("status", ""), condition(node, kind).get("reason", "")


def apply(node: Node, *options: str) -> None:
    """Run `trackbed apply` on the node. It must succeed."""
    words = ["trackbed", "apply", *options, "--timeout", str(int(DEADLINE))]
    applied = node.run(words, timeout=DEADLINE + 60)
    assert applied.returncode == 0, applied.stdout + applied.stderr


def test_apply_may_allow_more_disruption_once(node: Node) -> None:
    numvfs = f"/sys/bus/pci/devices/{NICS[0].pci}/sriov_numvfs"
    change_spec(node, nics=fewer_vfs(node, 5), disruption={"allow": "none"})
    eventually("the deferral", lambda: status(node, "UpToDate") == ("False", "Deferred"))
    refused = node.run(["trackbed", "apply"], timeout=120)
    assert refused.returncode == 1
    assert "vf-reset is not allowed now" in refused.stdout
    assert node.sh(f"cat {numvfs}").strip() == "7"
    apply(node, "--allow", "vf-reset")
    assert node.sh(f"cat {numvfs}").strip() == "5"
    history = [json.loads(line) for line in node.sh("trackbed history --json").splitlines()]
    (reset,) = [
        entry for entry in history if entry["outcome"]["change"]["kind"] == "vfs" and entry["trigger"] == "apply"
    ]
    assert reset["outcome"]["result"] == "applied"


def test_a_value_that_another_program_undoes_again_and_again_is_left_alone(node: Node) -> None:
    netdev = f"{NICS[1].netdev}v0"

    def put_back() -> bool:
        node.sh(f"test $(cat /sys/class/net/{netdev}/mtu) = 1400 || ip link set {netdev} mtu 1400")
        return status(node, "Uncontended") == ("False", "Contended")

    eventually("the end of the fight", put_back)
    assert not ready(node)
    assert f"vf_links {NICS[1].pci}#0 mtu: 1400 -> 9000" in node.run(["trackbed", "doctor"]).stdout
    apply(node)
    assert node.sh(f"cat /sys/class/net/{netdev}/mtu").strip() == "9000"


def test_a_node_that_is_only_observed_is_left_as_it_is(node: Node) -> None:
    change_spec(node, mode="observe")
    node.sh(f"ip link set {NICS[0].netdev}v0 mtu 1400")
    eventually("the report of it", lambda: status(node, "Converged") == ("False", "Observing"))
    assert node.sh(f"cat /sys/class/net/{NICS[0].netdev}v0/mtu").strip() == "1400"
    # Another event of the same change has the node checked once more.
    eventually("readiness", lambda: ready(node))
    assert node.sh(f"cat /sys/class/net/{NICS[0].netdev}v0/mtu").strip() == "1400"
    change_spec(node, mode="enforce")
    eventually("the repair", lambda: node.sh(f"cat /sys/class/net/{NICS[0].netdev}v0/mtu").strip() == "9000")


def test_a_node_configured_by_other_tools_gives_a_spec_with_an_empty_plan(node: Node) -> None:
    # As a node that has never had an agent: what a spec asked for before would be put back to how it was before that.
    node.sh("systemctl stop trackbed; rm /run/trackbed/originals.jsonl")
    device = f"/sys/bus/pci/devices/{NICS[1].pci}"
    node.sh(
        f"echo 0 > {device}/sriov_numvfs; echo 1 > {device}/sriov_drivers_autoprobe; echo 3 > {device}/sriov_numvfs"
    )
    node.sh(f"udevadm settle; ip link set {NICS[1].netdev} vf 1 vlan 55 trust on")
    written = node.run(["sh", "-c", "trackbed inspect --as-spec | tee /tmp/as.json"], timeout=60, check=True)
    vfs = json.loads(written.stdout)["nics"][1]["vfs"]
    assert vfs["count"] == 3
    # With Linux 6.12 the PF shows the MAC of each VF, which is in the spec, too.
    (group,) = (each for each in vfs["groups"] if each["index"] == "1")
    assert (group["trust"], group["vlan"]) == (True, 55)
    planned = node.run(["trackbed", "plan", "--spec", "/tmp/as.json"], timeout=60)
    assert (planned.returncode, planned.stdout) == (0, "nothing to change\n")


def test_stat_counts_rdma_traffic(node: Node) -> None:
    function = NICS[0].vf_pcis[0]
    (device,) = node.sh(f"ls /sys/bus/pci/devices/{function}/infiniband").split()
    for peer in ("", "127.0.0.1"):
        node.sh(f"setsid ib_write_bw -d {device} -x 0 -D 120 {peer} >/dev/null 2>&1 </dev/null &")
        eventually("who listens, or is connected", lambda: node.sh("ss -Htan sport = :18515").strip() != "")
    stat = ["trackbed", "stat", "-d", function, "-l", "--count", "2", "--json"]
    last: dict[str, Any] = {}

    def moves() -> bool:
        last.update(json.loads(node.run(stat, timeout=60, check=True).stdout.splitlines()[-1]))
        return bool(last["devices"][0]["tx_packets"]["total"] > 0)

    eventually("RDMA traffic", moves)
    rdma, netdev = last["devices"]
    assert (rdma["name"], netdev["name"]) == (device, f"{NICS[0].netdev}v0")
    assert rdma["rx_packets"]["average"] > 0


def test_the_bundle_has_what_support_needs(node: Node) -> None:
    done = json.loads(node.run(["trackbed", "bundle", "--json"], timeout=400, check=True).stdout)
    listed = node.sh(f"tar -tzf {done['path']}")
    for part in (
        "files/run/trackbed/report.json",
        f"files{SPEC}",
        "trackbed/plan.json",
        "dmesg.txt",
        "journal.txt",
        "lspci.txt",
    ):
        assert f"trackbed-bundle/{part}" in listed
    assert "kubernetes" not in listed
    assert node.sh(f"stat -c %a {done['path']}").strip() == "600"
    wait_ready(node)


def test_a_slurm_job_is_refused_by_the_examples_prolog_while_a_nic_is_missing(node: Node) -> None:
    # An emulated node takes longer than a server to start a command.
    text = re.sub(r"^limit=\d+$", "limit=60", PROLOG.read_text(), flags=re.MULTILINE)
    node.write("/tmp/prolog", text, mode="755")
    # As slurmd starts it: without a search path. There is no Slurm here, and so no scontrol.
    prolog = ["env", "-i", "SLURMD_NODENAME=node1", "/tmp/prolog"]
    started = node.run(prolog, timeout=120)
    assert (started.returncode, started.stdout, started.stderr) == (0, "", "")
    node.unplug(NICS[0].pci)
    eventually("not ready", lambda: not ready(node))
    refused = node.run(prolog, timeout=120)
    assert (refused.returncode, refused.stdout) == (1, "")
    assert re.match(r"node node1 is refused: not ready after 3 s; \w+ is (False|Unknown)", refused.stderr)
    assert len(refused.stderr.splitlines()) == 1
    node.replug()
    wait_ready(node)
    assert node.run(prolog, timeout=120).returncode == 0
