"""NVIDIA's toolkit: the deploy installs it from a repository of the lab, for real dockerd, containerd and CRI-O.

There is no GPU: a container that asks for one must be refused, and a device of the test's own stands for it.
"""

import json
import re
import subprocess
from collections.abc import Iterator

import grpc
import pytest

from lab import MACHINES, Node, repository
from lab.cluster.programs import CONTAINERD
from lab.go import go_programs
from lab.packages import crio, nvidia
from tests.lab.conftest import DEPLOYED, Done, changed, eventually, kept, refusal, succeeded, wait_ready
from tests.lab.conftest import deploy as deploy_node
from tests.lab.containers import cri

pytestmark = pytest.mark.campaign

ENGINES = "engines"
DAEMON = {
    "bridge": "none",
    "default-ulimits": {"nofile": {"Name": "nofile", "Hard": 65536, "Soft": 65536}},
    "exec-opts": ["native.cgroupdriver=systemd"],
    "insecure-registries": ["registry.example.net:5000"],
    "iptables": False,
    "live-restore": True,
    "log-driver": "json-file",
    "log-opts": {"max-file": "3", "max-size": "100m"},
    "max-concurrent-downloads": 10,
    "registry-mirrors": ["https://mirror.example.net/"],
    "runtimes": {"site": {"path": "/usr/sbin/runc"}},
    "storage-driver": "overlay2",
}
SANDBOX = "registry.example.net/pause:3.9"
CONFIG = f"""\
# The site's own: this line must not go.
version = 2
imports = ["/etc/containerd/conf.d/*.toml"]
oom_score = -999

[grpc]
  max_recv_message_size = 33554432

[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{SANDBOX}"
  max_concurrent_downloads = 5
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "native"
    discard_unpacked_layers = true
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = true
  [plugins."io.containerd.grpc.v1.cri".registry.mirrors."docker.io"]
    endpoint = ["https://mirror.example.net"]
  [plugins."io.containerd.grpc.v1.cri".registry.configs."registry.example.net".auth]
    username = "puller"
    password = "correct horse"
"""
SCHEDULER = """\
version = 2
[plugins."io.containerd.gc.v1.scheduler"]
  mutation_threshold = 321
"""
# containerd 2's own version of the file. Debian 12 has containerd 1.6.
CONFIG_3 = f"""\
version = 3
imports = ["/etc/containerd/conf.d/*.toml"]

[plugins."io.containerd.cri.v1.images"]
  snapshotter = "native"
  max_concurrent_downloads = 5
  [plugins."io.containerd.cri.v1.images".pinned_images]
    sandbox = "{SANDBOX}"
  [plugins."io.containerd.cri.v1.images".registry]
    config_path = "/etc/containerd/certs.d"

[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
    SystemdCgroup = true
"""
CDI = {
    "cdiVersion": "0.5.0",
    "kind": "trackbed.internal/test",
    "devices": [
        {
            "name": "one",
            "containerEdits": {
                "deviceNodes": [{"path": "/dev/injected", "hostPath": "/dev/zero"}],
                "env": ["INJECTED=yes"],
            },
        }
    ],
}


RUN = "docker run --rm --network none -e NVIDIA_VISIBLE_DEVICES={} busybox /bin/busybox sh -c {}"
DEVICE = "trackbed.internal/test=one"
PF = MACHINES[0].nics[0]
SLEEP = ("/bin/busybox", "sleep", "9999")
TELLS = ("/bin/busybox", "sh", "-c", "echo $INJECTED > /dev/said; exec /bin/busybox sleep 3600")
TOLD = ("/bin/busybox", "sh", "-c", "test -c /dev/injected && cat /dev/said")
PROOF = ("/bin/busybox", "sh", "-c", "test -c /dev/injected && echo $INJECTED")


@pytest.fixture(scope="module")
def vendor(deployed: tuple[Node, ...]) -> Iterator[tuple[repository.Repository, str]]:
    """The repository, and its URL."""
    made = nvidia.vendor(deployed[0].image)
    with repository.serve(made.folder) as url:
        yield made, url


@pytest.fixture(scope="module")
def with_engines(deployed: tuple[Node, ...], vendor: tuple[repository.Repository, str]) -> Node:
    """A node with both engines and a running container of each, and with a snapshot of this state."""
    node = deployed[0]
    if not (kept() and node.has(ENGINES)):
        node.restore(DEPLOYED)
        wait_ready(node)
        install_engines(node, vendor[1])
        node.snapshot(ENGINES)
    return node


@pytest.fixture
def engines(with_engines: Node) -> Node:
    """The node with both engines, as they were installed."""
    with_engines.restore(ENGINES)
    wait_ready(with_engines)
    return with_engines


def install_engines(node: Node, url: str) -> None:
    """Debian's dockerd and containerd, with files as real nodes have them."""
    node.write("/etc/docker/daemon.json", json.dumps(DAEMON, indent=2))
    node.write("/etc/containerd/config.toml", CONFIG, mode="600")
    node.write("/etc/containerd/conf.d/10-site.toml", SCHEDULER)
    node.write("/etc/cdi/test.json", json.dumps(CDI))
    # busybox asks for another initramfs: minutes of an emulated CPU.
    node.write("/etc/initramfs-tools/update-initramfs.conf", "update_initramfs=no\n")
    install(node, url, *nvidia.engines(node.image))
    # The lists of Debian's own are minutes of an emulated apt, each time.
    node.sh("rm -rf /etc/apt/sources.list /etc/apt/sources.list.d/* /var/lib/apt/lists")
    node.sh(
        "cd /srv; mkdir -p rootfs/bin rootfs/dev rootfs/proc rootfs/sys rootfs/etc; cp /bin/busybox rootfs/bin\n"
        """tar -C /srv/rootfs -c . | docker import -c 'CMD ["/bin/busybox", "sleep", "9999"]' - busybox\n"""
        "ctr run --detach --rootfs /srv/rootfs old /bin/busybox sleep 9999\n"
        "docker run --detach --network none --name old busybox\n"
        f"docker tag busybox {SANDBOX}; docker save {SANDBOX} | ctr -n k8s.io images import --snapshotter native -",
        timeout=600,
    )


def install(node: Node, url: str, *packages: str) -> None:
    """Install packages from this repository alone."""
    node.write("/run/only.list", f"deb [trusted=yes] {url} ./\n")
    apt = (
        "apt-get -q -oDir::Etc::SourceList=/run/only.list -oDir::Etc::SourceParts=/dev/null -oAcquire::Languages=none"
        " -oDir::State::Lists=/run/lists -oDpkg::Options::=--force-confold -oDpkg::Options::=--force-unsafe-io"
    )
    node.sh(
        f"mkdir -p /run/lists/partial; export DEBIAN_FRONTEND=noninteractive; {apt} update\n"
        f"{apt} -y install --no-install-recommends {' '.join(packages)}",
        timeout=900,
    )


def deploy(vendor: tuple[repository.Repository, str], *engines: str, **more: object) -> Done:
    """The deploy of the first node, with the toolkit from the test's repository."""
    made, url = vendor
    given = {"engines": list(engines), "version": nvidia.VERSION, "repository": made.given(url), **more}
    return deploy_node(container_runtime=given)


def running(node: Node) -> list[str]:
    """The processes of all containers: their numbers, and since when they run."""
    return node.sh("ps -C busybox -o pid=,lstart=").splitlines()


def dump(node: Node) -> set[str]:
    """What containerd makes of its files; each line with the section that it is in."""
    settings, section = set(), ""
    for line in node.sh("containerd config dump").splitlines():
        if line.strip().startswith("["):
            section = line.strip()
        elif " = " in line and not line.startswith("imports = "):
            settings.add(f"{section} {line.strip()}")
    return settings


def refuses_gpus(engine: cri.Cri, pod: tuple[bytes, bytes]) -> None:
    with pytest.raises(grpc.RpcError, match=r"(?i)nvml"):
        engine.container(pod, SANDBOX, *SLEEP, NVIDIA_VISIBLE_DEVICES="all")


def injects_cdi_devices(engine: cri.Cri, pod: tuple[bytes, bytes]) -> None:
    """By itself, one that there is and no other."""
    assert engine.run(engine.container(pod, SANDBOX, *SLEEP, cdi=DEVICE), *PROOF) == "yes\n"
    with pytest.raises(grpc.RpcError, match=r"trackbed\.internal/test=two"):
        engine.container(pod, SANDBOX, *SLEEP, cdi="trackbed.internal/test=two")
    refuses_gpus(engine, pod)


def test_docker_and_containerd_get_the_runtime_and_keep_all_else(
    engines: Node, vendor: tuple[repository.Repository, str]
) -> None:
    node = engines
    containers, before = running(node), dump(node)
    assert len(containers) == 2
    docker_since = node.sh("systemctl show -p ExecMainStartTimestampMonotonic docker")
    succeeded(deploy(vendor, "containerd", "docker"))

    # By each engine's own word.
    info = json.loads(node.sh("docker info --format '{{json .}}'"))
    assert info["DefaultRuntime"] == "nvidia"
    assert {"nvidia", "runc", "site"} <= set(info["Runtimes"])
    assert info["RegistryConfig"]["Mirrors"] == DAEMON["registry-mirrors"]
    now = dump(node)
    gone = {line for line in before - now if "default_runtime_name" not in line}
    assert gone == set()
    assert all(".runtimes.nvidia" in line or 'default_runtime_name = "nvidia"' in line for line in now - before)
    assert any(".runtimes.nvidia.options]" in line and "SystemdCgroup = true" in line for line in now)
    assert json.loads(node.sh("cat /etc/docker/daemon.json")) == {
        **DAEMON,
        "default-runtime": "nvidia",
        "runtimes": {"site": {"path": "/usr/sbin/runc"}, "nvidia": {"path": "nvidia-container-runtime", "args": []}},
    }

    # Comments are there, and no password is in a file that others may read.
    assert node.sh("cat /etc/containerd/config.toml") == CONFIG
    assert node.sh("stat -c %a /etc/containerd/conf.d/99-nvidia.toml").strip() == "600"
    assert running(node) == containers
    assert node.sh("systemctl show -p ExecMainStartTimestampMonotonic docker") == docker_since

    # The default runtime injects a CDI device, refuses a GPU that is not there, and locks as much memory as it likes.
    shell = "'test -c /dev/injected && echo $INJECTED && ulimit -l'"
    assert node.sh(RUN.format(DEVICE, shell), timeout=600).split() == ["yes", "unlimited"]
    refused = node.run(["sh", "-c", RUN.format("all", "true")], timeout=600)
    assert refused.returncode != 0
    assert "failed to initialize NVML" in refused.stderr
    with cri.connect(node) as containerd:
        pod = containerd.pod("one")
        # A process that is started later in the container has containerd's environment, without the runtime's additions.
        container = containerd.container(pod, SANDBOX, *TELLS, NVIDIA_VISIBLE_DEVICES=DEVICE)
        eventually("the device, and its variable", lambda: containerd.run(container, *TOLD) == "yes\n")
        refuses_gpus(containerd, pod)
        containers = running(node)

    assert changed(deploy(vendor, "containerd", "docker")) == []
    assert running(node) == containers


def test_a_vf_in_a_running_container_of_docker_is_steered(engines: Node) -> None:
    node = engines
    pid = node.sh("docker inspect --format '{{.State.Pid}}' old").strip()
    node.sh(f"ip link set {PF.netdev}v1 netns {pid}")
    node.sh(f"nsenter --net=/proc/{pid}/ns/net ip link set {PF.netdev}v1 up")
    masks = f"docker exec old /bin/busybox cat /sys/class/net/{PF.netdev}v1/queues/rx-0/rps_cpus"
    eventually("RPS", lambda: int(node.sh(masks), 16) != 0)
    node.sh("docker rm --force old")
    eventually("the VF", lambda: node.sh(f"ls /sys/bus/pci/devices/{PF.vf_pcis[1]}/net").strip() != "")


@pytest.mark.parametrize(
    ("path", "old", "new", "said"),
    [
        ("/etc/docker/daemon.json", '"bridge": "none",', '"bridge": "none"', "daemon.json: parse error: .* at line 3"),
        ("/etc/containerd/config.toml", "[grpc]", "[grpc", r"config.toml: \(6, 2\): "),
        (
            "/etc/docker/daemon.json",
            '"site": {',
            '"nvidia": {"path": "x", "runtimeArgs": ["--debug"]}, "site": {',
            "runtimeArgs",
        ),
    ],
)
def test_a_file_that_cannot_be_changed_stops_the_deploy_and_stays(
    engines: Node, vendor: tuple[repository.Repository, str], path: str, old: str, new: str, said: str
) -> None:
    node = engines
    text = node.sh(f"cat {path}")
    assert old in text
    node.write(path, text.replace(old, new, 1))
    refused = refusal(deploy(vendor, "docker" if "docker" in path else "containerd"))
    assert re.search(said, refused), refused
    assert node.sh(f"cat {path}") == text.replace(old, new, 1)
    assert node.run(["test", "-e", "/etc/containerd/conf.d/99-nvidia.toml"]).returncode != 0
    assert len(running(node)) == 2


def test_if_an_engine_does_not_accept_its_files_the_former_ones_are_restored(
    engines: Node, vendor: tuple[repository.Repository, str]
) -> None:
    node = engines
    containers, before = running(node), node.sh("cat /etc/docker/daemon.json")
    # dockerd refuses a key that is given twice: as an option, and in its file.
    node.sh("echo DOCKER_OPTS=--default-runtime=site > /etc/default/docker; systemctl restart docker", timeout=300)
    refused = refusal(deploy(vendor, "docker"))
    assert "its former files are restored" in refused
    assert "default-runtime" in refused
    assert node.sh("cat /etc/docker/daemon.json") == before
    assert node.sh("docker info --format '{{.DefaultRuntime}}'").strip() == "site"

    # Something about the new file keeps containerd from starting.
    node.write(
        "/etc/systemd/system/containerd.service.d/refuses.conf",
        "[Service]\nExecStartPre=/usr/bin/test ! -e /etc/containerd/conf.d/99-nvidia.toml\n",
    )
    node.sh("systemctl daemon-reload")
    refused = refusal(deploy(vendor, "containerd"))
    assert "it does not start with nvidia-ctk's" in refused
    assert node.run(["test", "-e", "/etc/containerd/conf.d/99-nvidia.toml"]).returncode != 0
    assert node.sh("systemctl is-active containerd docker").split() == ["active", "active"]
    assert running(node) == containers


def test_containerd_2_injects_cdi_devices_by_itself(engines: Node, vendor: tuple[repository.Repository, str]) -> None:
    node = engines
    built = go_programs.ensure(CONTAINERD)
    node.sh("docker rm --force old; systemctl stop docker.socket docker; systemctl stop containerd", timeout=300)
    copied = subprocess.run(
        ["scp", "-q", "-F", node.ssh_config, *built.iterdir(), f"{node.name}:/usr/local/bin/"], check=False
    )
    assert copied.returncode == 0
    unit = "[Service]\nExecStart=\nExecStart=/usr/local/bin/containerd\n"
    node.write("/etc/systemd/system/containerd.service.d/two.conf", unit)
    node.write("/etc/containerd/config.toml", CONFIG_3)
    node.sh("systemctl daemon-reload; systemctl start containerd; containerd --version | grep -F v2.2.9", timeout=300)
    before = dump(node)
    with cri.connect(node) as containerd:
        containerd.pod("before")
    containers = running(node)
    succeeded(deploy(vendor, "containerd", cdi=True))
    assert running(node) == containers
    now = dump(node)
    assert {line for line in before - now if "default_runtime_name" not in line} == set()
    assert any("default_runtime_name = 'nvidia'" in line for line in now)
    assert any("enable_cdi = true" in line for line in now)
    assert node.sh("systemctl is-enabled nvidia-cdi-refresh.path nvidia-cdi-refresh.service").split() == ["enabled"] * 2
    with cri.connect(node) as containerd:
        injects_cdi_devices(containerd, containerd.pod("after"))


@pytest.fixture
def with_crio(engines: Node) -> Node:
    """The node with CRI-O in the place of the others, and with the image of the containers in CRI-O's store."""
    node = engines
    with repository.serve(crio.vendor(node.image).folder) as url:
        install(node, url, "cri-o")
    node.write("/etc/crio/crio.conf.d/20-site.conf", f'[crio.image]\npause_image = "{SANDBOX}"\npause_command = ""\n')
    node.sh(
        f"""
        docker save --output /srv/image.tar {SANDBOX}
        docker rm --force old; ctr task kill --signal SIGKILL old; ctr task delete old
        systemctl stop docker.socket docker containerd
        copyimg --signature-policy /etc/crio/policy.json --import-from docker-archive:/srv/image.tar --image-name {SANDBOX}
        systemctl start crio
        """,
        timeout=300,
    )
    return node


def default_runtime(node: Node) -> str:
    """By the running CRI-O's own word."""
    [line] = [line for line in node.sh("crio status config").splitlines() if "default_runtime = " in line]
    return line.split('"')[1]


def test_cri_o_gets_the_runtime_and_injects_cdi_devices_by_itself(
    with_crio: Node, vendor: tuple[repository.Repository, str]
) -> None:
    node = with_crio
    assert default_runtime(node) == "runc"
    with cri.connect(node, cri.CRIO) as engine:
        engine.container(engine.pod("before"), SANDBOX, *SLEEP)
    containers = running(node)
    # The sandbox is one, too.
    assert len(containers) == 2
    succeeded(deploy(vendor, "crio"))
    assert default_runtime(node) == "nvidia"
    assert running(node) == containers
    with cri.connect(node, cri.CRIO) as engine:
        pod = engine.pod("after")
        told = engine.container(pod, SANDBOX, *TELLS, NVIDIA_VISIBLE_DEVICES=DEVICE)
        eventually("the device, and its variable", lambda: engine.run(told, *TOLD) == "yes\n")
        injects_cdi_devices(engine, pod)
        containers = running(node)
    assert changed(deploy(vendor, "crio")) == []
    assert running(node) == containers
