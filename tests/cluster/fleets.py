"""The manifests of inventories/prod.py, as its deploy renders them for hosts that answer from a table of hardware."""

import runpy
from pathlib import Path
from typing import Any

from tests.deploy.fake import IMPORT
from tests.deploy.hardware import GPUS, function, has, nic, rdma
from tests.lab.conftest import ROOT, pyinfra, succeeded

RAILS = runpy.run_path(str(ROOT / "group_data" / "connectx_roce.py"))["nics"]
CLUSTERS = ("own_cluster", "managed_cluster")


def _connectx(address: str, ids: str, number: int) -> dict[str, Any]:
    """A port of a ConnectX with one VF, each with its RDMA device."""
    name = f"ens{number}"
    vf = function(f"{address[:-1]}4", "15b3:101e", f"{name}v0", rdma(f"mlx5_{number + 20}"), index=0)
    return function(address, ids, name, rdma(f"mlx5_{number}"), total_vfs=8, vfs=[vf])


def _hardware() -> dict[str, dict[str, Any]]:
    """The answers of a host of each group."""
    rails = [nic(rail["name"], _connectx(rail["select"]["pci"], "15b3:1021", n)) for n, rail in enumerate(RAILS)]
    ports = [nic(f"port{n}", _connectx(f"0000:{0x3B + n:02x}:00.0", "15b3:101d", n)) for n in (0, 1)]
    erdma = nic(
        "erdma0", function("0000:00:06.0", "1ded:107f", "eth1", rdma("erdma_0", transport="iWARP"), driver="erdma")
    )
    return {
        "connectx_roce": has(*rails, others=GPUS),
        "bare_metal_sriov": has(*ports),
        "erdma": has(erdma, others=GPUS),
        "erdma_cpu": has(erdma),
    }


def rendered(folder: Path) -> dict[str, Path]:
    """Run the task that renders manifests, for every group; the folder of each cluster by its group's name."""
    prod = runpy.run_path(str(ROOT / "inventories" / "prod.py"))
    plugins = {
        host: {
            **runpy.run_path(str(ROOT / "group_data" / f"{name}.py"))["device_plugins"],
            "folder": str(folder / name),
        }
        for name in CLUSTERS
        for host in prod[name]
    }
    lines = [f"{name} = {[f'@fake/{host}' for host in prod[name]]!r}" for name in CLUSTERS]
    for group, answers in _hardware().items():
        hosts, data = prod[group]
        fake = {"fake_responses": answers, "fake_delay": 0, "fake_delay_jitter": 0}
        made = [(f"@fake/{host}", {**given, **fake, "device_plugins": plugins[host]}) for host, given in hosts]
        lines.append(f"{group} = ({made!r}, {data!r})")
    (folder / "fleet.py").write_text(IMPORT + "\n".join(lines) + "\n")
    (folder / "deploy.py").write_text("from tasks.kubernetes import manifests\nmanifests.render()\n")
    succeeded(pyinfra("-y", "--group-data", "group_data", str(folder / "fleet.py"), str(folder / "deploy.py")))
    return {name: folder / name for name in CLUSTERS}
