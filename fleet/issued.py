"""Approves and denies requests for certificates, and compares the issued certificates with the requests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any

import httpx2
from lightkube import ApiError, Client
from lightkube.resources.certificates_v1 import CertificateSigningRequest

from fleet.certificate_request import differences
from fleet.connection import TEMPORARY, why
from fleet.objects import name_of
from fleet.reading import PlainApproval, PlainRequest

TIMEOUT = 15.0
"""Seconds to wait for the signer. If a certificate comes later, only the node's reporter compares it with the request."""

CHECK_INTERVAL = 0.2


def decide(client: Client, request: CertificateSigningRequest) -> None:
    """Write the decision into a request's status. This fails if the request was changed since it was read.

    :raises ApiError: as the client does.
    """
    client.replace(PlainApproval.from_dict(request.to_dict()), name_of(request))


def wrong(client: Client, approved: Mapping[str, CertificateSigningRequest]) -> dict[str, str]:
    """What is wrong with the certificates of approved requests, by the request's name.

    An API server that does not answer is asked again until :data:`TIMEOUT`.

    :param approved: the requests, by name.
    """
    end = time.monotonic() + TIMEOUT
    reasons: dict[str, str] = {}
    waiting = dict(approved)
    trouble = ""
    while waiting:
        trouble = ""
        for name, request in list(waiting.items()):
            try:
                status = _status(client, name)
            except httpx2.HTTPError as error:
                if _is_temporary(error):
                    # It concerns the other requests, too, and each of them could take another time-out.
                    trouble = why(error)
                    break
                status, reasons[name] = None, _not_compared(why(error))
            if status is not None and not status.get("certificate"):
                continue
            del waiting[name]
            seconds = request.spec.expirationSeconds or 0
            if faults := differences(status["certificate"], request.spec.request, seconds) if status else []:
                reasons[name] = (
                    f"its certificate is not what was approved: {'; '.join(faults)}; shut the node out, and see who signs "
                    "in this cluster (docs/fleet.md)"
                )
        if waiting and time.monotonic() >= end:
            break
        time.sleep(CHECK_INTERVAL if waiting else 0)
    return {**reasons, **dict.fromkeys(waiting if trouble else (), _not_compared(trouble))}


def _not_compared(reason: str) -> str:
    return f"its certificate cannot be compared: {reason}"


def _is_temporary(error: httpx2.HTTPError) -> bool:
    """Whether the API server, or what is before it, may answer soon."""
    return error.status.code in TEMPORARY if isinstance(error, ApiError) else isinstance(error, httpx2.TransportError)


def _status(client: Client, name: str) -> dict[str, Any] | None:
    """The status of a request; None: it was deleted, denied, or failed."""
    try:
        status: dict[str, Any] = client.get(PlainRequest, name).get("status") or {}
    except ApiError as error:
        if error.status.code == HTTPStatus.NOT_FOUND:
            return None
        raise
    failed = any(condition.get("type") in ("Denied", "Failed") for condition in status.get("conditions", []))
    return None if failed else status
