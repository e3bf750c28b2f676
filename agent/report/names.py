"""Names that several programs use: files on a node, and what the reporter and the fleet's commands share in Kubernetes."""

SPEC_FILE = "/etc/trackbed/node.json"
"""The node's spec: the deploy writes it, and the agent reads it."""

RUN_FOLDER = "/run/trackbed"
STATE_FOLDER = "/var/lib/trackbed"
"""The agent's runtime and state directories, as its unit names them."""

NAMESPACE = "trackbed-system"
"""Of the Leases; one for each node, of the Node's name."""

READY = "TrackbedReady"
UP_TO_DATE = "TrackbedUpToDate"
"""The Node's two conditions."""

TAINT = "readiness.k8s.io/trackbed"
"""The taint's key; its effect is NoSchedule."""

READY_LABEL = "trackbed.internal/ready"

SPEC_HASH = "trackbed.internal/spec-hash"
AGENT_VERSION = "trackbed.internal/agent-version"
"""Annotations of the Lease, written by the reporter: a Node's own annotations are not its to write."""

NOT_READY = "trackbed.internal/not-ready"
"""Annotation of the Lease, written by the reporter: why the node is not ready, while its Node cannot be made to say so."""

MAINTENANCE = "trackbed.internal/maintenance"
"""Annotation of the Node, written by `maintain`: what it has done and has not undone yet."""

NODE_USER = "trackbed:node:"
"""The reporter's user name, followed by the Node's."""

ENROLMENT = f"system:serviceaccount:{NAMESPACE}:enrolment"
"""Who may ask for a node's first certificate."""

LONGEST_MESSAGE = 1024
"""Characters of a condition's message."""

LEASE_DURATION = 900
"""Seconds after which a Lease has expired, whatever more it says itself."""

NOTICE = "SaidByItsLease"
"""The reason of a node that is not ready by the annotation of its Lease, and of the condition that `sweep` then writes."""

EXPIRED = "LeaseExpired"
"""The reason of a condition that `sweep` made Unknown."""
