"""The client of the Kubernetes API, for the fleet's commands and the deploy."""

from __future__ import annotations

import errno
import json
import os
import shutil
import ssl
import subprocess
from collections.abc import Callable, Mapping, Sequence
from threading import Lock
from typing import Any, TypeVar

import httpx2
from lightkube import Client
from lightkube.config import client_adapter
from lightkube.config.kubeconfig import SingleConfig
from lightkube.config.models import NameValue, User
from lightkube.core import generic_client
from lightkube.core.exceptions import ApiError
from lightkube.models.meta_v1 import Status
from msgspec.structs import replace

from fleet.decoding import convert
from fleet.kubeconfig import REMEDY, Misconfigured, Plugin, ProxiedCluster

C = TypeVar("C")

_verify_cluster = client_adapter.verify_cluster


def _as_other_clients(*words: Any, **named: Any) -> ssl.SSLContext:
    """lightkube's TLS context without the check that :func:`agent.reporter.kubernetes.api.trust` also leaves out."""
    context = _verify_cluster(*words, **named)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


# lightkube makes the context itself. To give it a transport with another one would turn off proxies (HTTPS_PROXY).
client_adapter.verify_cluster = _as_other_clients


class PluginFailed(httpx2.RequestError):
    """The kubeconfig's credential plugin gives no credentials, so a request cannot be sent. The message has the remedy.

    It may be the first request, or a later one, for which the credentials have expired.
    """


_NOT_RUN = {
    errno.ENOEXEC: "is it a program for this machine, or a script with a #! line?",
    errno.ENOENT: "is the interpreter of its #! line installed?",
}


_running = Lock()


def _output_of_plugin(command: Sequence[str], env: Mapping[str, str]) -> bytes:
    """Runs a credential plugin as lightkube does, with a message for each failure, and without the terminal, as it is told."""
    plugin = f"the kubeconfig's exec command {command[0]!r}"
    try:
        # One at a time, if several threads need new credentials: it may wait for a browser, or use a token that counts once.
        with _running:
            done = subprocess.run(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
                # Ctrl-C must not end the plugin: `fleet maintain` then needs credentials to uncordon its nodes.
                start_new_session=True,
            )
    except OSError as error:
        remedy = _NOT_RUN.get(error.errno or 0, "try to run it")
        raise PluginFailed(f"{plugin} cannot be run: {error.strerror}; {remedy}") from None
    except ValueError as error:
        raise PluginFailed(f"{plugin} cannot be run with its args and env: {error}; check them") from None
    if done.returncode:
        said = done.stderr.decode(errors="replace").split("\n")
        last = next((line for line in reversed(said) if line.strip()), "it printed no error")
        raise PluginFailed(f"{plugin} failed with exit code {done.returncode}: {last.strip()}; try it with kubectl")
    return done.stdout


client_adapter.sync_check_output = _output_of_plugin

TEMPORARY = (429, 502, 503, 504)
"""HTTP status codes of an API server that is overloaded or restarts, or of a proxy before it, so that a retry may succeed."""


def unreachable(error: httpx2.TransportError) -> str:
    """Why the API server gave no answer."""
    if isinstance(error, httpx2.LocalProtocolError):
        # Its text quotes the header, which holds the token.
        return "the request cannot be sent; has the kubeconfig's token a line break or another control character?"
    return f"the API server cannot be reached: {str(error) or type(error).__name__}"


def _with_status(e: httpx2.HTTPError) -> httpx2.HTTPError:
    """The API server's error, also for an answer that is no JSON, or has no Content-Type, which lightkube's function expects.

    The API server itself says 429 as plain text (WithMaxInFlightLimit of k8s.io/apiserver), and a load balancer 502 as HTML.
    """
    return ApiError(request=e.request, status=_status(e)) if isinstance(e, httpx2.HTTPStatusError) else e


def _status(e: httpx2.HTTPStatusError) -> Status:
    code = e.response.status_code
    try:
        document = e.response.json()
        if isinstance(document, dict) and document.get("kind") == "Status":
            status = convert(document, Status)
            return replace(status, code=status.code or code)
    # msgspec's errors are ValueErrors, too.
    except ValueError:
        pass
    origin = "" if code in TEMPORARY else f" from {e.request.url}, which may be no API server"
    return Status(code=code, message=f"HTTP status {code}{origin}")


generic_client.transform_exception = _with_status


class _Proxied(httpx2.HTTPTransport):
    """Sends each request through a kubeconfig's proxy. Its errors name the proxy, which may be the one that does not answer.

    A proxy of https is verified as the API server is, by the cluster's certificate authority, as client-go does (addTLS of Go's
    net/http/transport.go).
    """

    def __init__(self, proxy: httpx2.URL, trust: ssl.SSLContext) -> None:
        self._name = proxy.copy_with(username=None, password=None, path=None, query=None)
        secured = trust if proxy.scheme == "https" else None
        super().__init__(verify=trust, proxy=httpx2.Proxy(proxy, ssl_context=secured))

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        """Send one."""
        try:
            return super().handle_request(request)
        except httpx2.TransportError as error:
            text = str(error) or type(error).__name__
            raise type(error)(f"through the proxy {self._name}: {text}", request=request) from error


def _transport(config: SingleConfig) -> httpx2.HTTPTransport | None:
    """What sends the requests, if the kubeconfig names a proxy. None: lightkube's own, which asks the environment for one."""
    cluster = config.cluster
    if not isinstance(cluster, ProxiedCluster) or not cluster.proxy_url:
        return None
    trust = client_adapter.verify_cluster(cluster, config.user or User(), config.abs_file)
    return _Proxied(httpx2.URL(cluster.proxy_url), trust)


TIMEOUT = httpx2.Timeout(10.0, read=30.0)
"""Seconds for the connection, and for the answer: a list of thousands of Nodes takes a while."""


def connect(config: SingleConfig) -> Client:
    """A client of this cluster.

    :raises Misconfigured: the kubeconfig's credential plugin is not installed; a certificate, a key or a proxy cannot be used.
    """
    config = _with_exec_info(config)
    files = "a certificate or key of the kubeconfig or of SSL_CERT_FILE"
    client = made(
        lambda: Client(config, timeout=TIMEOUT, field_manager="trackbed-fleet", transport=_transport(config)),
        files,
        REMEDY,
    )
    cluster = config.cluster
    if isinstance(cluster, ProxiedCluster) and (name := cluster.server_name):
        # The adapter's, since lightkube's client takes no hooks.
        client._client._client.event_hooks = {"request": [lambda request: request.extensions.update(sni_hostname=name)]}
    return client


def made(make: Callable[[], C], files: str, remedy: str) -> C:
    """A client whose URL and settings were checked, so that only certificates and the environment can be wrong.

    :param files: what may hold a wrong certificate, and the remedy for that.
    :raises Misconfigured: one of the files, or a proxy of the environment, cannot be used.
    """
    try:
        return make()
    except OSError as error:
        raise Misconfigured(f"{files} cannot be read: {error}; {remedy}") from None
    except (httpx2.InvalidURL, ValueError, ImportError) as error:
        # The error's text may have the proxy's password.
        given = ", ".join(each for each in os.environ if each.lower() in PROXIES)
        raise Misconfigured(
            f"a proxy of the environment ({given}) cannot be used ({type(error).__name__}); give an HTTP proxy's URL, as "
            "http://proxy:3128"
        ) from None


PROXIES = ("https_proxy", "http_proxy", "all_proxy", "no_proxy")
"""Environment variables that name proxies, in small or capital letters."""

EXEC_INFO = "KUBERNETES_EXEC_INFO"
EXEC_VERSION = "client.authentication.k8s.io/v1"


def _with_exec_info(config: SingleConfig) -> SingleConfig:
    """Have lightkube run a credential plugin of v1 as one of v1beta1, which it knows: the input and the token are the same.

    The plugin learns the version from an environment variable, which lightkube does not set
    (kubernetes.io/docs/reference/access-authn-authz/authentication, "client-go credential plugins").
    """
    user = config.user
    if user is None or user.exec is None:
        return config
    plugin = user.exec
    if shutil.which(plugin.command) is None:
        hint = " ".join((plugin.installHint or "").split())
        raise Misconfigured(
            f"the kubeconfig's exec command {plugin.command!r} is not installed or not executable; install it"
            f"{hint and f': {hint}'}"
        )
    spec: dict[str, Any] = {"interactive": False}
    if isinstance(plugin, Plugin) and plugin.asks and isinstance(config.cluster, ProxiedCluster):
        spec["cluster"] = config.cluster.for_plugin(config.abs_file)
    info = {"apiVersion": plugin.apiVersion, "kind": "ExecCredential", "spec": spec}
    environment = [*(plugin.env or ()), NameValue(EXEC_INFO, json.dumps(info))]
    version = f"{EXEC_VERSION}beta1" if plugin.apiVersion == EXEC_VERSION else plugin.apiVersion
    return config._replace(user=replace(user, exec=replace(plugin, apiVersion=version, env=environment)))
