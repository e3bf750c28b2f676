"""Reads the tokens of ServiceAccounts (JSON Web Tokens): how long they are valid, and for which Node."""

from __future__ import annotations

import base64
import binascii
import json
from typing import Any

DAY = 86400
RENEW_AT = 2 / 3
"""The share of its life after which a deploy brings another token."""


def claims_of(part: str) -> dict[str, Any]:
    """The claims in the second part of a token; none if it is no such part."""
    try:
        claims = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (ValueError, binascii.Error):
        return {}
    return claims if isinstance(claims, dict) else {}


def shortened(token: str, days: int) -> str | None:
    """Says so if a token is valid for less than the requested days, and how often the deploy must run then; else None.

    The API server shortens it silently (--service-account-max-token-expiration): to a day on EKS, to two on GKE.
    """
    claims = claims_of(token.partition(".")[2].partition(".")[0])
    if not {"iat", "exp"} <= claims.keys():
        return None
    life = float(claims["exp"]) - float(claims["iat"])
    if life >= days * DAY:
        return None
    return (
        f"a token for {life / 3600:.0f} h instead of {days} d: the cluster makes no longer ones. Only a deploy in the last "
        f"third of that time brings the next token: deploy from a timer, at least every {life * (1 - RENEW_AT) / 3600:.0f} h. "
        "If the token expires, nothing of the node is published, and a sweep taints it"
    )
