"""How a node asks for its certificate, over a connection that loses an answer."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field

from agent.reporter.kubernetes.api import TROUBLE
from agent.reporter.kubernetes.identity import ANEW, REQUESTS, Certificate
from agent.reporter.settings import Settings
from tests.unit.scripted import api_server


@define
class Cluster:
    """An API server that keeps requests for certificates.

    ``losing``: so many answers of the next ones do not arrive. ``refusing``: with this status.
    """

    losing: int = 0
    refusing: int | None = None
    requests: dict[str, dict[str, Any]] = field(factory=dict)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]] | None:
        if method == "GET":
            found = self.requests.get(path.removeprefix(f"{REQUESTS}/"))
            return (404, {}) if found is None else (200, found)
        code = self._take(body)
        if self.losing:
            self.losing -= 1
            return None
        return code, {}

    def _take(self, body: dict[str, Any]) -> int:
        name = body["metadata"]["name"]
        if self.refusing is not None:
            return self.refusing
        if name in self.requests:
            return 409
        self.requests[name] = {**body, "status": {}}
        return 201


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def identity(cluster: Cluster, tmp_path: Path) -> Iterator[Certificate]:
    """The node's, before it has a certificate."""
    (tmp_path / "token").write_text("enrolment")
    with api_server(tmp_path, cluster.answer) as (url, authority):
        yield Certificate(Settings("a", url, str(authority)), tmp_path, tmp_path / "token")


def test_a_request_whose_answer_was_lost_is_not_made_twice(cluster: Cluster, identity: Certificate) -> None:
    cluster.losing = 2
    for _ in range(2):
        with pytest.raises(TROUBLE):
            identity.keep(0.0)
    identity.keep(0.0)
    ((name, made),) = cluster.requests.items()
    assert (identity.folder / "requested.name").read_text().strip() == name
    assert base64.b64decode(made["spec"]["request"]) == (identity.folder / "requested.csr").read_bytes()


@pytest.mark.parametrize("how", ["denied", "removed", "refused"])
def test_what_came_to_nothing_is_asked_for_anew_with_another_key(
    cluster: Cluster, identity: Certificate, how: str
) -> None:
    identity.keep(0.0)
    ((first, made),) = cluster.requests.items()
    if how == "denied":
        made["status"] = {"conditions": [{"type": "Denied", "message": "nobody knows it"}]}
        assert identity.keep(0.0) == ANEW
    elif how == "removed":
        cluster.requests.clear()
        assert identity.keep(0.0) == 0.0
    else:
        cluster.requests.clear()
        identity.keep(0.0)
        cluster.refusing = 422
        with pytest.raises(TROUBLE):
            identity.keep(0.0)
        cluster.refusing = None
    identity.keep(0.0)
    assert cluster.requests.keys() - {first}
