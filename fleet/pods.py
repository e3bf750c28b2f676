"""The pods of one node, and their eviction."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

from attrs import field, frozen
from lightkube import ALL_NS, ApiError
from lightkube.models.meta_v1 import DeleteOptions, ObjectMeta, Preconditions
from lightkube.resources.core_v1 import Pod

from fleet.api import ABSENT, Api, code
from fleet.connection import TEMPORARY
from fleet.eviction import CannotDrain, Rules, drain, full_name, is_terminating, read_pod, why_not_now
from fleet.objects import metadata_of
from fleet.reading import PlainPod


@frozen
class NodePods:
    """The pods of a node. ``began``: when its drain began. ``check_stop``: called before each eviction; may raise.

    ``_announced``: the pods whose eviction was said.
    """

    api: Api
    node: str
    rules: Rules
    began: datetime
    tell: Callable[[str], object]
    check_stop: Callable[[], object]
    _announced: set[str] = field(factory=set, init=False)

    def read(self) -> list[Pod]:
        """Read all of them."""
        listed = self.api.client.list(PlainPod, namespace=ALL_NS, fields={"spec.nodeName": self.node})
        return [read_pod(document) for document in listed]

    def take(self) -> tuple[str, str]:
        """Request the eviction of the remaining pods; their names, and why they are still there.

        :raises CannotDrain: pods of the node must not be evicted.
        """
        plan = drain(self.read(), self.rules, self.began)
        if plan.blockers:
            raise CannotDrain("; ".join(plan.blockers))
        refused = [self._evict(pod) for pod in plan.evict if not is_terminating(pod)]
        why = "; ".join(dict.fromkeys(filter(None, refused)))
        return ", ".join(map(full_name, plan.evict)), why or "they do not end"

    def _evict(self, pod: Pod) -> str:
        """Request a pod's eviction; why it is refused, or an empty text."""
        self.check_stop()
        metadata, name = metadata_of(pod), full_name(pod)
        # A StatefulSet may have started another pod of this name, on another node.
        same = DeleteOptions(preconditions=Preconditions(uid=metadata.uid))
        named = ObjectMeta(name=metadata.name, namespace=metadata.namespace)
        body = Pod.Eviction(metadata=named, deleteOptions=same)
        try:
            self.api.client.create(body, metadata.name or "", namespace=metadata.namespace or "")
        except ApiError as error:
            if code(error) == ABSENT:
                return ""
            if why := why_not_now(error):
                return f"{name}: {why}"
            if code(error) in TEMPORARY:
                raise
            raise CannotDrain(f"{name}: {error.status.message}") from None
        if name not in self._announced:
            self._announced.add(name)
            self.tell(f"{self.node}: evicting {name}")
        return ""
