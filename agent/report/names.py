"""What the reporter on a node, and the commands here, call the same things in Kubernetes."""

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

MAINTENANCE = "trackbed.internal/maintenance"
"""Annotation of the Node, written by `maintain`: what it has done and has not undone yet."""

NODE_USER = "trackbed:node:"
"""The reporter's user name, followed by the Node's."""

ENROLMENT = f"system:serviceaccount:{NAMESPACE}:enrolment"
"""Who may ask for a node's first certificate."""

LEASE_DURATION = 900
"""Seconds after which a Lease has expired, whatever more it says itself."""

EXPIRED = "LeaseExpired"
"""The reason of a condition that `sweep` made Unknown."""
