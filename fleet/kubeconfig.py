"""Reads a kubeconfig: the cluster and the user of one context. Each fault of the file is one message.

lightkube's own reader ends with a KeyError or a TypeError if the file is not as it expects.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import httpx2
import yaml
from lightkube.config.kubeconfig import DEFAULT_KUBECONFIG, SingleConfig
from lightkube.config.models import Cluster, Context, User, UserExec
from lightkube.core.exceptions import ConfigError
from msgspec import Struct, ValidationError, field
from msgspec.structs import replace

from agent.documents import read
from fleet.decoding import convert
from fleet.paths import expanded

LARGEST = 4 << 20
"""Bytes. A file with a thousand clusters has three million: most are certificates."""

REMEDY = "check it with kubectl"

IMPERSONATION = ("as", "as-uid", "as-groups", "as-user-extra")
"""Keys of a user that lightkube ignores: it would act with the user's own rights."""


class Misconfigured(ConfigError):
    """The kubeconfig has a fault. The message says which, and the remedy."""


class _Context(Struct):
    """A context. Those that are not used may be unfinished (`kubectl config set-context`)."""

    cluster: str = ""
    user: str = ""
    namespace: str | None = None


class _Extension(Struct):
    name: str
    extension: Any = None


class ProxiedCluster(Cluster):
    """A cluster with keys that lightkube ignores. ``proxy_url``: the HTTP proxy of all requests; empty: the environment's.

    ``server_name``: the name in the server's certificate; empty: the server's host name. ``extensions``: what other programs
    keep in the file.
    """

    proxy_url: str = field(name="proxy-url", default="")
    server_name: str = field(name="tls-server-name", default="")
    extensions: tuple[_Extension, ...] = ()

    def for_plugin(self, whole: Callable[[str], str | os.PathLike[str]]) -> dict[str, Any]:
        """What a credential plugin is told if it asks for its cluster (Cluster of client.authentication.k8s.io/v1).

        :param whole: the whole path of a file of the kubeconfig.
        """
        told = {"server": self.server, "certificate-authority-data": self.certificate_auth_data}
        if self.certificate_auth and not self.certificate_auth_data:
            content = Path(whole(self.certificate_auth)).read_bytes()
            told["certificate-authority-data"] = base64.b64encode(content).decode()
        # A proxy's password does not belong in an environment.
        told["proxy-url"] = "" if "@" in self.proxy_url else self.proxy_url
        config = {each.name: each.extension for each in self.extensions}.get("client.authentication.k8s.io/exec")
        told["tls-server-name"] = self.server_name
        every = {**told, "insecure-skip-tls-verify": self.insecure, "config": config}
        return {key: value for key, value in every.items() if value}


class _NamedCluster(Struct):
    name: str
    cluster: ProxiedCluster = field(default_factory=ProxiedCluster)


class Plugin(UserExec):
    """A credential plugin with a key that lightkube ignores. ``asks``: it is to be told its cluster."""

    asks: bool = field(name="provideClusterInfo", default=False)


class _User(User):
    exec: Plugin | None = None


class _NamedUser(Struct):
    name: str
    user: _User = field(default_factory=_User)


class _NamedContext(Struct):
    name: str
    context: _Context = field(default_factory=_Context)


class _Kubeconfig(Struct, rename="kebab"):
    clusters: tuple[_NamedCluster, ...] = ()
    users: tuple[_NamedUser, ...] = ()
    contexts: tuple[_NamedContext, ...] = ()
    current_context: str = ""


def default_file() -> Path:
    """The kubeconfig that KUBECONFIG names, else that of the home folder.

    :raises Misconfigured: KUBECONFIG names several files.
    """
    # As for kubectl, an empty name is none, and a file that is named again is the same one.
    named = [*dict.fromkeys(each for each in os.environ.get("KUBECONFIG", "").split(os.pathsep) if each)]
    if len(named) > 1:
        raise Misconfigured(f"KUBECONFIG names {len(named)} files, and only one can be used; set it to that one")
    return expanded(named[0] if named else DEFAULT_KUBECONFIG)


def from_kubeconfig(file: Path, context: str | None = None) -> SingleConfig:
    """The cluster and the user of a kubeconfig's context; without one, of its current context.

    :raises Misconfigured: the file is wrong, or has a key that has no effect here.
    :raises ConfigError: there is no such file or context.
    """
    file = expanded(file).absolute()
    document = _document(file)
    try:
        content = convert(_without_nulls(document), _Kubeconfig)
    # YAML's aliases can make a list contain itself.
    except (ValidationError, RecursionError) as error:
        raise Misconfigured(f"{file} is no kubeconfig: {error}; {REMEDY}") from None
    name = content.current_context if context is None else context
    if not name and context is None:
        raise ConfigError(f"{file} has no current context")
    of = next((each.context for each in content.contexts if each.name == name), None)
    if of is None:
        raise ConfigError(f"{file} has no context {name!r}")
    cluster = _named(file, name, "cluster", of.cluster, content.clusters).cluster
    # Without a user there are no credentials, as for a server behind `kubectl proxy`.
    user = User()
    if of.user:
        user = _named(file, name, "user", of.user, content.users).user
        _refuse_impersonation(file, document, of.user)
    user = _with_whole_paths(_without_empty(user), file.parent)
    config = SingleConfig(name, Context(of.cluster, of.user or None, of.namespace), cluster, user, file)
    if fault := next(chain(_of_cluster(config), _of_proxy(cluster.proxy_url), _of_user(config, user)), ""):
        raise Misconfigured(f"{file}: {fault}; {REMEDY}")
    return config


def _document(file: Path) -> Any:
    try:
        return yaml.safe_load(read(file, LARGEST))
    except (FileNotFoundError, NotADirectoryError):
        raise Misconfigured(
            f"the kubeconfig {file} is not found; give its path by --kubeconfig or KUBECONFIG, in an inventory by "
            "kubernetes.kubeconfig"
        ) from None
    except OSError as error:
        raise Misconfigured(f"the kubeconfig {file} cannot be read: {error.strerror}; give another file") from None
    except yaml.YAMLError as error:
        # The error's text quotes the file, which holds credentials.
        mark = error.problem_mark if isinstance(error, yaml.MarkedYAMLError) else None
        at = f" in line {mark.line + 1}" if mark else ""
        raise Misconfigured(f"the kubeconfig {file} is not YAML{at}; {REMEDY}") from None
    except (ValueError, RecursionError) as error:
        raise Misconfigured(
            f"the kubeconfig {file} cannot be read: {type(error).__name__}: {error}; {REMEDY}"
        ) from None


def _without_nulls(value: Any) -> Any:
    """A document without the keys whose value is null, which mean the same as no key, as for kubectl."""
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return [_without_nulls(each) for each in value] if isinstance(value, list) else value


def _without_empty(user: User) -> User:
    """An empty text means the same as no key, as for kubectl. lightkube would send an empty token."""
    return replace(user, **{key: None for key in User.__struct_fields__ if getattr(user, key) == ""})


Kind = Literal["cluster", "user"]


def _named(file: Path, context: str, kind: Kind, name: str, entries: Sequence[Any]) -> Any:
    if not name:
        raise Misconfigured(f"{file}: the context {context!r} has no {kind}; {REMEDY}")
    found = [each for each in entries if each.name == name]
    if len(found) != 1:
        said = (
            f"the context {context!r} names the {kind} {name!r}; the file has {len(found)} of that name, and needs one"
        )
        raise Misconfigured(f"{file}: {said}; {REMEDY}")
    return found[0]


def _refuse_impersonation(file: Path, document: Any, name: str) -> None:
    entry = next(each for each in document["users"] if each["name"] == name)
    for key in IMPERSONATION:
        if (entry.get("user") or {}).get(key):
            raise Misconfigured(f"{file}: the user {name!r} has {key}, which cannot be used here; use one without it")


def _with_whole_paths(user: User, folder: Path) -> User:
    """lightkube looks for these two files from the working folder, and for all others from the kubeconfig's, as kubectl does.

    A plugin's command without a slash is looked for in PATH (ResolveLocalPaths of k8s.io/client-go/tools/clientcmd).
    """
    if user.token_file:
        user = replace(user, token_file=str(folder / user.token_file))
    if user.exec and os.sep in user.exec.command:
        user = replace(user, exec=replace(user.exec, command=str(folder / user.exec.command)))
    return user


def _of_cluster(config: SingleConfig) -> Iterator[str]:
    cluster = config.cluster
    try:
        url = httpx2.URL(cluster.server)
    except (httpx2.InvalidURL, UnicodeError) as error:
        yield f"the server is no URL: {error}"
        return
    if url.userinfo:
        yield "the server's URL has a user or a password; give them as the user's username and password"
    elif url.scheme not in ("http", "https") or not url.host:
        yield f"the server is no URL: {cluster.server!r} is none such as https://10.0.0.1:6443"
    yield from _of_file(config, "certificate-authority", cluster.certificate_auth)
    yield from _of_data("certificate-authority-data", cluster.certificate_auth_data)


def _of_proxy(given: str) -> Iterator[str]:
    if not given:
        return
    instead = "give an HTTP proxy's URL, as http://proxy:3128"
    # No message shows the URL, which may have a password.
    try:
        url = httpx2.URL(given)
    except (httpx2.InvalidURL, UnicodeError):
        yield f"the cluster's proxy-url is no URL; {instead}"
        return
    if url.scheme in ("socks5", "socks5h"):
        yield f"the cluster's proxy-url is a SOCKS proxy's, which cannot be used here; {instead}"
    elif url.scheme not in ("http", "https") or not url.host:
        yield f"the cluster's proxy-url is no URL of a proxy; {instead}"


def _of_user(config: SingleConfig, user: User) -> Iterator[str]:
    for kind, path, data in (
        ("client-certificate", user.client_cert, user.client_cert_data),
        ("client-key", user.client_key, user.client_key_data),
    ):
        yield from _of_file(config, kind, path)
        yield from _of_data(f"{kind}-data", data)
    if (user.client_cert or user.client_cert_data) and not (user.client_key or user.client_key_data):
        yield "the user has a client-certificate and no client-key"
    yield from _of_token("token", user.token or "")
    if faults := list(_of_file(config, "tokenFile", user.token_file)):
        yield from faults
    elif user.token_file:
        try:
            yield from _of_token(f"tokenFile {user.token_file!r}", read(Path(user.token_file), LARGEST).strip())
        except ValueError as error:
            yield f"tokenFile {user.token_file!r} holds no token: {error}"


def _of_file(config: SingleConfig, key: str, path: str | None) -> Iterator[str]:
    whole = config.abs_file(path) if path else None
    # pathlib's function raises some errors, as for a folder that may not be searched.
    if whole and not (os.path.isfile(whole) and os.access(whole, os.R_OK)):  # noqa: PTH113
        yield f"{key} {str(whole)!r} is no file that can be read"


def _of_data(key: str, data: str | None) -> Iterator[str]:
    try:
        # The standard's decoder ignores line breaks only (encoding/base64 of Go).
        base64.b64decode("".join((data or "").splitlines()), validate=True)
    except ValueError as error:
        yield f"{key} is not base64: {error}"


def _of_token(where: str, token: str) -> Iterator[str]:
    # No message shows the token.
    if not (token.isascii() and token.isprintable()):
        yield f"{where} has a line break or another character that no token has"
