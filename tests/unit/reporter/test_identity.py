"""The reporter's token: which one it uses, when it requests the next one, and what it accepts as an answer."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from attrs import define, evolve, field

from agent.reporter.kubernetes.api import Api, NoCredentials, Refused
from agent.reporter.kubernetes.identity import LEAST_WAIT, RENEW_AT, RENEWED, TOKENS, BoundToken
from agent.reporter.settings import Settings
from tests.unit.reporter.scripted import api_server, token_of

LIFE = 86400.0


@define
class Issuer:
    """An API server that makes tokens. ``asked``: the requests; ``status``: another status of its answers than success."""

    status: int = 201
    make: Callable[[], Any] = lambda: token_of("n1", issued=LIFE, life=LIFE)
    asked: list[Any] = field(factory=list)

    def answer(self, method: str, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        self.asked.append((method, path, body["spec"]))
        return self.status, {"status": {"token": self.make()}, "message": "no"}


@pytest.fixture
def issuer(tmp_path: Path) -> Iterator[tuple[Issuer, BoundToken]]:
    made = Issuer()
    (tmp_path / "brought").write_text(token_of("n1", issued=0.0, life=LIFE) + "\n")
    with api_server(tmp_path, made.answer) as (url, authority):
        yield made, BoundToken(Settings("n1", url, str(authority), token_days=2), tmp_path, tmp_path / "brought")


def api_of(identity: BoundToken) -> Api:
    return Api(identity.settings.server, identity.session)


def test_threads_that_begin_at_once_share_one_tls_context(issuer: tuple[Issuer, BoundToken]) -> None:
    """A connection cannot resume a TLS session of another context: each further one of that thread would fail."""
    with ThreadPoolExecutor(2) as threads:
        for identity in (evolve(issuer[1]) for _ in range(50)):
            first, second = threads.map(lambda session: session().tls, [identity.session] * 2)
            assert first is second


def test_it_requests_the_next_token_for_the_same_node_before_its_own_ends(issuer: tuple[Issuer, BoundToken]) -> None:
    server, identity = issuer
    early, late = (share * LIFE for share in RENEW_AT)
    due = identity.keep(0.0, api_of(identity))
    assert early <= due <= late
    assert identity.keep(due - 1.0, api_of(identity)) == pytest.approx(1.0)
    assert server.asked == []
    assert early <= identity.keep(due, api_of(identity)) - LIFE + due <= late
    bound = {"apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "u1"}
    assert server.asked == [("POST", TOKENS, {"boundObjectRef": bound, "expirationSeconds": 2 * 86400})]
    assert identity.session().token == token_of("n1", issued=LIFE, life=LIFE)
    assert (identity.folder / RENEWED).stat().st_mode & 0o777 == 0o600
    # One that the deploy brings later counts again: the Node was made anew.
    identity.brought.write_text(token_of("n1", "u2", issued=LIFE + 1))
    assert identity.session().token == token_of("n1", "u2", issued=LIFE + 1)


def test_on_a_full_disk_it_uses_the_next_token_until_it_ends(
    issuer: tuple[Issuer, BoundToken], capfd: pytest.CaptureFixture[str]
) -> None:
    server, identity = issuer
    (identity.folder / RENEWED).mkdir()
    identity.keep(LIFE, api_of(identity))
    assert "cannot be written" in capfd.readouterr().err
    assert identity.session().token == token_of("n1", issued=LIFE, life=LIFE)
    identity.keep(LIFE + 1, api_of(identity))
    assert len(server.asked) == 1


def test_nodes_that_got_their_tokens_at_once_do_not_renew_them_at_once(issuer: tuple[Issuer, BoundToken]) -> None:
    _, identity = issuer
    fleet = [
        BoundToken(identity.settings, identity.folder, identity.brought).keep(0.0, api_of(identity)) for _ in range(200)
    ]
    assert max(fleet) - min(fleet) > (RENEW_AT[1] - RENEW_AT[0]) * LIFE / 2


def test_a_clock_that_is_far_ahead_does_not_make_it_renew_all_the_time(issuer: tuple[Issuer, BoundToken]) -> None:
    server, identity = issuer
    assert identity.keep(1e10, api_of(identity)) == LEAST_WAIT
    assert len(server.asked) == 1


BAD: dict[str, Any] = {
    "none": None,
    "no text": 5,
    "nothing": "",
    "no token": "a.b.c",
    "for another node": token_of("n2", issued=LIFE),
    "for the node made anew": token_of("n1", "u2", issued=LIFE),
    "with a header": f"{token_of('n1', issued=LIFE)}\r\nImpersonate-User: admin",
    "beyond text": "\ud800",
}


@pytest.mark.parametrize("what", BAD)
def test_an_answer_that_is_no_token_for_its_node_is_not_kept(issuer: tuple[Issuer, BoundToken], what: str) -> None:
    server, identity = issuer
    server.make = lambda: BAD[what]
    with pytest.raises(Refused, match="something that is not a token for the Node n1"):
        identity.keep(LIFE, api_of(identity))
    assert identity.session().token == token_of("n1", issued=0.0, life=LIFE)


@pytest.mark.parametrize("damage", [b"", b"\xff", b"x" * (1 << 20), b"a.b.c"])
def test_a_damaged_file_of_its_own_leaves_the_token_of_the_deploy(
    issuer: tuple[Issuer, BoundToken], damage: bytes
) -> None:
    _, identity = issuer
    (identity.folder / RENEWED).write_bytes(damage)
    assert identity.session().token == token_of("n1", issued=0.0, life=LIFE)


# The one before the last was in the file of the deploy's token in earlier versions: it could only request a certificate.
@pytest.mark.parametrize("brought", ["", "a.b.c", token_of("n1", ""), token_of("n2")])
def test_without_a_token_for_its_node_it_says_how_to_get_one(issuer: tuple[Issuer, BoundToken], brought: str) -> None:
    _, identity = issuer
    identity.brought.write_text(brought)
    for use in (identity.session, lambda: identity.keep(0.0, api_of(identity))):
        with pytest.raises(NoCredentials, match=r"once the node has joined: pyinfra INVENTORY deploys/token\.py"):
            use()
    identity.brought.unlink()
    with pytest.raises(NoCredentials, match="No such file or directory; the deploy delivers it"):
        identity.session()
