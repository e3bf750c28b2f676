"""Reads the tokens of ServiceAccounts (JSON Web Tokens): for how long they are valid, and for which Node."""

from __future__ import annotations

import base64
import json

from attrs import frozen


@frozen
class Claims:
    """What a token says of itself. ``issued``, ``expires``: seconds since the epoch, by the API server's clock.

    ``node``, ``uid``: the Node that it is bound to; empty: none.
    """

    issued: float = 0.0
    expires: float = 0.0
    node: str = ""
    uid: str = ""


def claims_of(part: str) -> Claims:
    """The claims in the second of a token's three parts; the default ones if it is no such part."""
    try:
        document = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
        node = document.get("kubernetes.io", {}).get("node", {})
        return Claims(
            float(document["iat"]), float(document["exp"]), str(node.get("name", "")), str(node.get("uid", ""))
        )
    except (ValueError, TypeError, AttributeError, LookupError, OverflowError, RecursionError):
        return Claims()
