"""Names that several programs use: files on a node, and what the reporter and the fleet's commands share in Kubernetes."""

COMMAND = "/usr/local/bin/trackbed"
"""The agent's command on a node. Callers use the whole path, since sudo's PATH on RHEL does not include /usr/local/bin."""

SPEC_FILE = "/etc/trackbed/node.json"
"""The node's spec: the deploy writes it, and the agent reads it."""

RUN_FOLDER = "/run/trackbed"
STATE_FOLDER = "/var/lib/trackbed"
"""The agent's runtime and state directories, as its unit names them."""

KUBELET_FOLDERS = ("/var/lib/kubelet", "/var/lib/k0s/kubelet", "/var/snap/microk8s/common/var/lib/kubelet")
"""The kubelet's folder of kubeadm, k3s, RKE2 and most others, then of the two distributions that use another --root-dir."""

KUBELET_CPUS = tuple(f"{folder}/cpu_manager_state" for folder in KUBELET_FOLDERS)
"""The kubelet's files of the CPUs that it has given to pods."""

CPU_CLAIMS = "/run/cdi/dra.k8s.io-cpu_*.json"
"""The CDI files in which dra-driver-cpu, the DRA driver for CPUs, tells container runtimes the CPUs of each claim."""

CGROUPS = "/sys/fs/cgroup"
"""The root of the cgroups. Those that are partitions of cpusets own CPUs."""

REPORT = "report.json"
"""The report file in the runtime directory: the agent writes it, and the reporter and the commands read it."""

NAMESPACE = "trackbed-system"
"""The namespace of the Leases. Each node has one, with the Node's name."""

READY = "TrackbedReady"
UP_TO_DATE = "TrackbedUpToDate"
DEVICES_READY = "TrackbedDevicesReady"
"""The Node's conditions. The last one names the NICs that are not ready."""

TAINT = "readiness.k8s.io/trackbed"
EFFECT = "NoSchedule"
"""The taint's key, and its effect."""

READY_LABEL = "trackbed.internal/ready"

QUARANTINE = "trackbed.internal/quarantine"
"""The key of the taint in each DeviceTaintRule of a reporter. The taint's value is the PCI address, with "-" for ":"."""

OF_NODE = "trackbed.internal/node"
EVICT_AFTER = "trackbed.internal/evict-after"
"""Labels of such a rule: its Node, and the seconds after which `fleet sweep` may evict the device's pods."""

SPEC_HASH = "trackbed.internal/spec-hash"
AGENT_VERSION = "trackbed.internal/agent-version"
"""Annotations of the Lease, written by the reporter, which may not write a Node's annotations."""

NOT_READY = "trackbed.internal/not-ready"
"""Annotation of the Lease, written by the reporter if it cannot write the Node's condition: why the node is not ready."""

MAINTENANCE = "trackbed.internal/maintenance"
"""Annotation of the Node, written by `maintain`: the steps that it took and has not yet undone."""

ACCOUNT = "reporter"
"""The ServiceAccount of all reporters. Each has a token that is bound to its own Node."""

LONGEST_MESSAGE = 1024
"""Characters of a condition's message."""

LONGEST_NOTE = 128
"""Characters of an annotation of a Lease; the admission policy refuses more."""

LEASE_DURATION = 900
"""Seconds after which a Lease has expired, even if it names a longer duration itself."""

NOTICE = "SaidByItsLease"
"""The reason of the condition that `sweep` writes for a node whose Lease has the annotation :data:`NOT_READY`."""

EXPIRED = "LeaseExpired"
"""The reason of the condition that `sweep` sets to Unknown."""
