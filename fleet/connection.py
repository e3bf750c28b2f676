"""The client of the Kubernetes API, for the fleet's commands and the deploy."""

from __future__ import annotations

import ssl
from typing import Any

import httpx2
from lightkube import Client
from lightkube.config import client_adapter
from lightkube.config.kubeconfig import SingleConfig

_verify_cluster = client_adapter.verify_cluster


def _as_other_clients(*words: Any, **named: Any) -> ssl.SSLContext:
    """lightkube's TLS context without the check that :func:`agent.reporter.kubernetes.api.trust` also leaves out."""
    context = _verify_cluster(*words, **named)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


# lightkube makes the context itself. To give it a transport with another one would turn off proxies (HTTPS_PROXY).
client_adapter.verify_cluster = _as_other_clients


def connect(config: SingleConfig | None, name: str, timeout: httpx2.Timeout | None = None) -> Client:
    """A client of this cluster; None: the one of the environment.

    :param name: the field manager of what it writes.
    """
    return Client(config, timeout=timeout, field_manager=name)
