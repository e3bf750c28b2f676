"""The reporter's credentials for the API server: a ServiceAccount's token that is bound to the node's Node.

The deploy brings the first token. Before a token ends, the reporter requests the next one by it. An admission policy
(fleet/cluster/tokens-policy.yaml) allows that only for the same account and the same Node, by name and uid.
"""

from __future__ import annotations

import random
import re
import ssl
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path
from threading import Lock
from typing import Protocol

from attrs import define, field

from agent.documents import read
from agent.report.names import ACCOUNT, NAMESPACE
from agent.reporter.kubernetes.api import Api, NoCredentials, Refused, Session, trust
from agent.reporter.kubernetes.tokens import Claims, claims_of
from agent.reporter.settings import Settings
from agent.runtime import journal, write_atomically

TOKENS = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{ACCOUNT}/token"

RENEWED = "token"
"""The file in the reporter's own folder with the token that it has requested itself."""

DAY = 86400

RENEW_AT = (0.6, 0.7)
"""Shares of a token's life. It is renewed after one between these, which is drawn: a fleet's nodes must not renew at once."""

LEAST_WAIT = 600.0
"""Seconds between two renewals at least, however wrong the node's clock is."""

LONGEST_TOKEN = 64 << 10
"""Bytes of a token's file."""

# It becomes a header of a request.
_TOKEN = re.compile(r"[A-Za-z0-9_-]+\.([A-Za-z0-9_-]+)\.[A-Za-z0-9_-]+")


class Identity(Protocol):
    """The reporter's credentials."""

    def session(self) -> Session:
        """The credentials to use now.

        :raises NoCredentials: there are none yet.
        """

    def keep(self, now: float, api: Api) -> float:
        """Renew the credentials if they are due. :returns: the seconds until they may be due again.

        Raises as :meth:`Api.ask` does.

        :param now: seconds since the epoch.
        """


@define
class BoundToken:
    """The token that was issued last: the one that the deploy has ``brought``, or the reporter's own in ``folder``.

    ``_renewed``: the one that it has requested in this run, also if the disk is full.
    """

    settings: Settings
    folder: Path
    brought: Path
    _share: float = field(factory=lambda: random.uniform(*RENEW_AT), init=False)  # noqa: S311  no secret
    _renewed: tuple[str, Claims] = field(default=("", Claims()), init=False)
    _context: ssl.SSLContext | None = field(default=None, init=False)
    _making: Lock = field(factory=Lock, init=False)

    def session(self) -> Session:
        """The token that the files have now. Any thread may call this."""
        with self._making:  # a connection cannot resume a TLS session of another context
            self._context = self._context or trust(Path(self.settings.ca_file))
        return Session(self._context, self._current()[0])

    def _current(self) -> tuple[str, Claims]:
        tokens = [self._renewed]
        with suppress(OSError, ValueError):  # it has not renewed the token yet, or the file is damaged
            tokens.append(_token(read(self.folder / RENEWED, LONGEST_TOKEN)))
        try:
            tokens.append(_token(read(self.brought, LONGEST_TOKEN)))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or str(error)
            raise NoCredentials(f"{self.brought.name}: {why}; the deploy delivers it") from None
        own = [each for each in tokens if each[1].uid and each[1].node == self.settings.node_name]
        if not own:
            raise NoCredentials(
                "the deploy has brought no token yet; once the node has joined: pyinfra INVENTORY deploys/token.py"
            )
        # Of two that were issued in one second, the first counts: the reporter's own.
        return max(own, key=lambda each: each[1].issued)

    def keep(self, now: float, api: Api) -> float:
        """Request the next token if it is time."""
        _, claims = self._current()
        due = claims.issued + (claims.expires - claims.issued) * self._share
        if now < due:
            return due - now
        return max(self._renew(api, claims) - now, LEAST_WAIT)

    def _renew(self, api: Api, claims: Claims) -> float:
        """Request the next token for the same Node. :returns: when that one is to be renewed."""
        bound = {"apiVersion": "v1", "kind": "Node", "name": claims.node, "uid": claims.uid}
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"boundObjectRef": bound, "expirationSeconds": self.settings.token_days * DAY},
        }
        status = api.ask("POST", TOKENS, body=body).get("status")
        text, renewed = _token(str(status.get("token"))) if isinstance(status, dict) else ("", Claims())
        if (renewed.node, renewed.uid) != (claims.node, claims.uid):
            raise Refused(HTTPStatus.OK, f"something that is not a token for the Node {claims.node}")
        self._renewed = text, renewed
        try:
            write_atomically(self.folder / RENEWED, text + "\n")
        except OSError as error:
            journal(f"{self.folder / RENEWED} cannot be written: {error.strerror}; a restart forgets the next token")
        return renewed.issued + (renewed.expires - renewed.issued) * self._share


def _token(text: str) -> tuple[str, Claims]:
    """A token and its claims; empty ones if the text is no token."""
    stripped = text.strip()
    match = _TOKEN.fullmatch(stripped)
    return (stripped, claims_of(match[1])) if match else ("", Claims())
