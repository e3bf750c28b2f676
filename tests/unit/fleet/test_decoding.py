"""Threads that decode a type of the API for the first time, together. A process has one first time, so each case is one."""

import subprocess
import sys

import pytest

from tests.programs import success
from tests.unit.fleet.test_fleet import ROOT

PROGRAM = """
import json, sys
from threading import Barrier, Thread
from lightkube.core import decoders
from lightkube.models.meta_v1 import Status
from lightkube.resources.coordination_v1 import Lease
from lightkube.resources.core_v1 import Node, Pod
from lightkube.resources.policy_v1 import PodDisruptionBudget
from lightkube.resources.rbac_authorization_v1 import RoleBinding
from fleet import connection
from fleet.reading import PlainPod, read

type, THREADS = eval(sys.argv[1]), 8
if type is not Pod:
    # msgspec knows these sooner than Python takes the GIL away from a thread.
    sys.setswitchinterval(1e-6)
spec = {"containers": []}
role = {"apiGroup": "", "kind": "", "name": ""}
document = {"metadata": {"name": "x"}, "spec": spec, "roleRef": role, "status": "Success" if type is Status else {}}
one, several = json.dumps(document).encode(), json.dumps({"metadata": {}, "items": [document]}).encode()
barrier, done = Barrier(THREADS), []

def decode():
    barrier.wait()
    if sys.argv[2] == "read":
        done.append(read(document, type)[0].metadata.name)
    elif sys.argv[2] == "dict":
        done.append(type.from_dict(document).metadata and "x")
    elif sys.argv[2] == "answer":
        done.append(decoders.decode_object(one, type).metadata and "x")
    else:
        done.append(decoders.decode_list(several, type)[2] and "x")

threads = [Thread(target=decode) for _ in range(THREADS)]
[each.start() for each in threads]
[each.join() for each in threads]
assert done == ["x"] * THREADS, done
"""

WAYS = [
    *((type, "read") for type in ("Pod", "Node", "Lease", "PodDisruptionBudget")),
    *((type, "answer") for type in ("Pod", "Pod.Eviction", "Lease", "Status", "RoleBinding")),
    *((type, "list") for type in ("PlainPod", "Node", "RoleBinding")),
    *((type, "dict") for type in ("Status", "Pod")),
]


@pytest.mark.parametrize(("type", "way"), WAYS)
def test_threads_may_decode_a_type_for_the_first_time_together(type: str, way: str) -> None:
    success(subprocess.run([sys.executable, "-c", PROGRAM, type, way], cwd=ROOT, capture_output=True, text=True))
