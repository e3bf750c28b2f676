"""The lab's own driver of DRA, as a service of a node: its VFs are devices that pods claim (Kubernetes 1.34 or later)."""

from pathlib import Path

from lab.cluster import join
from lab.cluster.programs import HERE
from lab.go import go_programs
from lab.go.go_programs import Build
from lab.node import Node

BUILD = Build(name="dra-driver", folder=HERE / "dra-driver", packages=(".",), usual_s=90, memory_mib=1024)
UNIT = "dra-driver"
PROGRAM = Path("/usr/local/bin/dra-driver")

# As in containerd.service; the driver ends when containerd does, and before the kubelet has its certificate.
SERVICE = f"""[Unit]
After=containerd.service

[Service]
Environment=GOMAXPROCS=1
ExecStart={PROGRAM} --node={{}}
Restart=always
RestartSec=2
"""

# NRI's own limit of 2 s is short for an emulated machine: containerd then closes the connection.
NRI = """
[plugins.'io.containerd.nri.v1.nri']
plugin_registration_timeout = '60s'
plugin_request_timeout = '60s'
"""
CONTAINERD = "/etc/containerd/config.toml"


def start(node: Node) -> None:
    """Start the driver on a node that has joined, or start it anew. It is built and installed first if it is not there."""
    if node.run(["test", "-e", str(PROGRAM)]).returncode != 0:
        built = {PROGRAM.name: go_programs.ensure(BUILD) / PROGRAM.name}
        node.copy(built, str(PROGRAM.parent), join.INSTALL_S)
        node.run(["sh", "-c", f"cat >> {CONTAINERD}"], check=True, stdin=NRI)
        node.sh("systemctl restart containerd", timeout=join.READY_S)
    node.write(f"/etc/systemd/system/{UNIT}.service", SERVICE.format(join.node_name(node)))
    node.sh(f"systemctl daemon-reload; systemctl restart {UNIT}")
