"""Gives the reporter its settings and credentials for the API server.

If ``identity`` is certificate, the node makes its own key and requests its certificate. The deploy brings a token that allows
only such a request, and approves the request if it is the one that the node shows over SSH. If ``identity`` is token, the API
server makes a token for the deploy that is bound to the Node. In both cases the deploy uses the kubeconfig of the control host.
"""

from __future__ import annotations

import json
import time
from typing import Literal
from urllib.parse import urlsplit

from attrs import define, frozen
from pyinfra.api.command import FunctionCommand, QuoteString, StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host

from agent.report import names, published
from agent.reporter.settings import Settings, to_json
from agent.spec.node import NodeSpec
from fleet.paths import expanded
from tasks import packages
from tasks.common.commands import Commands, fail, script, warn
from tasks.common.connection import BY_CONTROL_HOST, deploys_itself
from tasks.common.data import Key, record, without_password
from tasks.common.facts import FactBase
from tasks.common.texts import Texts, replace
from tasks.kubernetes.authorities import read_authorities, removes_authorities
from tasks.kubernetes.clusters import shared_kubeconfig
from tasks.kubernetes.label_keys import EXTENDED_RESOURCE
from tasks.kubernetes.tokens import DAY, RENEW_AT, claims_of, shortened

SETTINGS = str(published.SETTINGS)
AUTHORITY = "/etc/trackbed/cluster-ca.pem"
SECRET = "/etc/trackbed/kubernetes-secret"  # noqa: S105  the name of a file
STATE_FOLDER = "/var/lib/trackbed-reporter"
PUBLISHED = str(published.PATH)
UNIT = "trackbed-reporter.service"

ENROLMENT_LIFE = 3600
"""Seconds for which a token can request a certificate. The API server's shortest tokens live ten minutes."""

LONGEST_COMMON_NAME = 64
"""Characters of a certificate's common name: X.520's bound, which OpenSSL keeps to."""


@frozen
class Kubernetes:
    """The inventory's key.

    ``server``: the API server's URL for nodes. ``ca_file``: the cluster's certificate authority, a file on the control host.
    ``identity``: the kind of the reporter's credentials. ``approved_by``: who approves a node's first certificate.
    ``kubeconfig``: on the control host; default $KUBECONFIG or ~/.kube/config. ``days``: the lifetime of a certificate or
    token. ``required_resources``: they must be allocatable before the taint is removed. ``taint_lifted_by``: who sets and
    removes it.
    """

    server: str
    ca_file: str
    identity: Literal["certificate", "token"] = "certificate"
    approved_by: Literal["deploy", "operator"] = "deploy"
    kubeconfig: str | None = None
    days: int = 365
    required_resources: tuple[str, ...] = ()
    taint_lifted_by: Literal["reporter", "node-readiness-controller"] = "reporter"

    def __attrs_post_init__(self) -> None:
        faults = []
        address = urlsplit(self.server)
        if address.scheme != "https" or not address.hostname or address.path.strip("/") or address.query:
            faults.append(f"server: {self.server!r} is not an API server's URL; give one as https://10.0.0.1:6443")
        try:
            without_password(self.server)
        except ValueError as error:
            faults = [f"server: {error}"]
        if not 1 <= self.days <= 365:
            faults.append(f"days: {self.days} is not valid; give 1 to 365")
        faults += [
            f"required_resources: {name!r} is not an extended resource; give one as rdma/hca_shared_devices_b"
            for name in self.required_resources
            if not EXTENDED_RESOURCE.fullmatch(name)
        ]
        if faults:
            raise ValueError("; ".join(faults))


KUBERNETES: Key[Kubernetes | None] = Key("kubernetes", None, record(Kubernetes))
KEYS = (KUBERNETES,)


@frozen
class ReporterSetup:
    """What a node gets: the texts of two files, and the inventory's key, which says how it gets a secret."""

    key: Kubernetes
    node: str
    settings: str
    authority: str


def wanted(spec: NodeSpec) -> ReporterSetup | None:
    """The current host's settings for Kubernetes; None: its reporter publishes nothing to Kubernetes.

    :raises DeployError: the certificate authority's file cannot be read, or the node's name does not fit into a certificate.
    """
    key = KUBERNETES.here()
    if key is None:
        return None
    longest = LONGEST_COMMON_NAME - len(names.NODE_USER)
    if key.identity == "certificate" and len(spec.node_name) > longest:
        raise DeployError(
            f"{host.name}.{KUBERNETES.name}.identity: the Node's name has {len(spec.node_name)} characters, and at most "
            f"{longest} fit into a certificate; give identity 'token', or a shorter node_name"
        )
    settings = Settings(
        spec.node_name, key.server, AUTHORITY, key.identity, key.required_resources, key.taint_lifted_by, key.days
    )
    return ReporterSetup(key, spec.node_name, to_json(settings), _authority(key))


def _authority(key: Kubernetes) -> str:
    file = expanded(key.ca_file)
    if deploys_itself(host) and not file.exists():  # it is on the control host
        if not (brought := host.get_fact(Texts, paths=(AUTHORITY,)).get(AUTHORITY)):
            raise DeployError(
                f"{host.name}.{KUBERNETES.name}.ca_file: the node has neither {file} nor {AUTHORITY}; {BY_CONTROL_HOST}"
            )
        return str(brought)
    try:
        return read_authorities(file)
    except (OSError, ValueError) as error:
        raise DeployError(
            f"{host.name}.{KUBERNETES.name}.ca_file: {file}: {error}; give the cluster's authority, a PEM file"
        ) from None


@frozen
class Credentials:
    """The credentials that the node has. ``certificate``: whether it has one that is valid now.

    ``secret``: the file with the token exists. ``start``, ``end``: the token's validity; 0: there is no token. ``uid``: the
    Node that the token is bound to; empty: the token can only request a certificate. ``refused``: the API server refuses these
    credentials. ``request``, ``csr``: a request for a certificate that waits to be approved.
    """

    certificate: bool = False
    secret: bool = False
    start: float = 0.0
    end: float = 0.0
    uid: str = ""
    refused: bool = False
    request: str = ""
    csr: str = ""


# Root reads files that the reporter writes. A hostile reporter could replace them by a link to a file of root's, or by a pipe
# that never ends. So dd follows no link, and does not wait for a pipe.
_READERS = """
content() { dd if="$1" iflag=nofollow,nonblock bs=65536 count=1 status=none 2>/dev/null; }
valid() { content "$1" | openssl x509 -noout -checkend 0 >/dev/null 2>&1; }
"""

# Prints the token's claims (the second part of three), and not its signature, which is the secret.
_CREDENTIALS = f"""{_READERS}
if valid "$2/reporter.pem"; then echo certificate yes; fi
if [ -f "$1" ]; then echo "secret $(cut -d. -f2 "$1")"; fi
if content "$3" | grep -qs "answers 401"; then echo refused yes; fi
if [ -s "$2/requested.name" ]; then
  echo "request $(content "$2/requested.name")"
  echo "csr $(content "$2/requested.csr" | base64 -w0)"
fi
"""


class NodeCredentials(FactBase[Credentials]):
    """The credentials that the node has."""

    default = Credentials

    def command(self) -> StringCommand:
        """Run one script, which prints nothing secret."""
        return script(_CREDENTIALS, SECRET, STATE_FOLDER, PUBLISHED)

    def process(self, output: list[str]) -> Credentials:
        """Parse lines of a word and a value."""
        by_word = {word: value for word, _, value in (line.partition(" ") for line in output)}
        claims = claims_of(by_word.get("secret", ""))
        bound = claims.get("kubernetes.io", {}).get("node", {})
        return Credentials(
            "certificate" in by_word,
            "secret" in by_word,
            float(claims.get("iat", 0)),
            float(claims.get("exp", 0)),
            bound.get("uid", ""),
            "refused" in by_word,
            by_word.get("request", ""),
            by_word.get("csr", ""),
        )


@deploy("Kubernetes")
def configure(spec: NodeSpec) -> None:
    """Write the reporter's settings and credentials; without the key `kubernetes`, remove them."""
    want = wanted(spec)
    if want is not None and want.key.identity == "certificate":
        packages.present(name="OpenSSL", names=("openssl",), family=packages.system().family)
    deliver(name="Settings and credentials", want=want)


@define
class NewToken:
    """Carries the token from the function that gets it to the command that writes it; empty until then."""

    token: str = ""


_RESTART = """
systemctl try-restart "$1" 2>/dev/null || true
"""


_FORGET = 'rm -f "$1"/reporter.pem "$1"/requested.*'


@operation()
def deliver(want: ReporterSetup | None) -> Commands:
    """Write the files that differ, and restart the reporter if it runs."""
    have = host.get_fact(Texts, paths=(SETTINGS, AUTHORITY))
    credentials = host.get_fact(NodeCredentials)
    certified = credentials.certificate or bool(credentials.request)
    if want is None:
        if have or credentials.secret:
            yield script('rm -rf "$1" "$2" "$3"', SETTINGS, AUTHORITY, SECRET)
        if certified:
            yield script(_FORGET, STATE_FOLDER)
        if not (have or credentials.secret or certified):
            host.noop("the reporter publishes nothing to Kubernetes")
        return
    moved = bool(have) and (
        removes_authorities(have.get(AUTHORITY, ""), want.authority) or _name(have.get(SETTINGS, "")) != want.node
    )
    texts = {SETTINGS: want.settings, AUTHORITY: want.authority}
    needs_token = _needs_secret(want, credentials, moved)
    unusable = want.key.identity == "certificate" and credentials.certificate and credentials.refused and not moved
    if unusable and host.state.is_executing:
        # A fault of the API server may pass, and another certificate may need an operator. So the deploy does not remove it.
        how = f"if it is of another cluster, remove {STATE_FOLDER}/reporter.pem on the node, and deploy again"
        warn(host, f"{KUBERNETES.name}: the API server refuses the valid certificate of {want.node}: {how}")
    if have == texts and not needs_token:
        host.noop("settings and credentials are as they should be")
        return
    if moved:
        # For another cluster, or under another name, the former certificate is useless.
        yield script(_FORGET, STATE_FOLDER)
    if needs_token:
        new_token = NewToken()
        yield FunctionCommand(_get_token, (want, new_token), {})
        yield _keep_secret(new_token.token, _RESTART if have == texts else "")
    yield from replace(have, texts, _RESTART, UNIT)


def _name(settings: str) -> str:
    """The Node's name in the settings that a node has."""
    try:
        return str(json.loads(settings)["node_name"])
    except (ValueError, KeyError, TypeError):
        return ""


def _needs_secret(want: ReporterSetup, have: Credentials, moved: bool) -> bool:
    if not have.secret or moved:
        return True
    # A token has one purpose: one that is bound to a Node cannot request a certificate, and one that can cannot publish.
    fits = bool(have.uid) == (want.key.identity == "token")
    if want.key.identity == "certificate":
        old = time.time() > have.end - ENROLMENT_LIFE * (1 - RENEW_AT)
        return not have.certificate and (not fits or have.refused or old)
    # If the Node was deleted and created again, the API server refuses the token that was bound to the former one.
    return not fits or have.refused or time.time() > have.start + (have.end - have.start) * RENEW_AT


def _keep_secret(token: str, after: str) -> StringCommand:
    """Write the secret from standard input: so it is in no argument, no log, and no file of other users. Then run ``after``."""
    text = f'umask 077; mkdir -p -m 755 "${{1%/*}}"; cat > "$1.new"; mv -T "$1.new" "$1"; shift\n{after}'
    return StringCommand("sh", "-ec", QuoteString(text), "sh", *map(QuoteString, (SECRET, UNIT)), _stdin=token)


# pyinfra calls a function that has parameters `state` and `host` directly; its result says whether the command succeeded.
def _get_token(state: State, host: Host, want: ReporterSetup, new_token: NewToken) -> bool:
    if deploys_itself(host):
        return fail(
            host,
            f"{KUBERNETES.name}: no token for {want.node}: only a control host can get one; {BY_CONTROL_HOST}",
        )
    if shared := shared_kubeconfig(host, KUBERNETES.name):
        return fail(host, f"{KUBERNETES.name}.kubeconfig: no token for {want.node}: {shared}")
    # Imported only where it is used: importing the client takes a tenth of the time of a deploy that changes nothing.
    from fleet import credentials

    key = want.key
    try:
        if key.identity == "certificate":
            new_token.token = credentials.enrolment_token(key.kubeconfig, ENROLMENT_LIFE)
        else:
            new_token.token = credentials.bound_token(key.kubeconfig, want.node, key.days * DAY)
            if short := shortened(new_token.token, key.days):
                warn(host, f"{KUBERNETES.name}.days: {want.node} got {short}")
    except credentials.NotJoined as error:
        # Before it joins, a node has no Node to which a token could be bound. That is no error.
        warn(host, f"{error}: the next deploy brings its token")
    except credentials.NotGiven as error:
        return fail(host, f"{KUBERNETES.name}.kubeconfig: no token for {want.node}: {error}")
    return True


@deploy("Kubernetes")
def enrol(spec: NodeSpec) -> None:
    """Approve the node's request for a certificate, if the inventory leaves that to the deploy."""
    want = wanted(spec)
    if want is not None and want.key.identity == "certificate" and want.key.approved_by == "deploy":
        approve(name="Certificate", want=want)


# The reporter makes its request when it starts, and then looks for the answer every 5 s. An expired certificate does not count.
_WAIT_FOR_REQUEST = f"""{_READERS}
for turn in $(seq 60); do
  if [ -s "$1/requested.name" ] || valid "$1/reporter.pem"; then exit 0; fi
  sleep 1
done
echo "the node has not requested a certificate; see: trackbed status" >&2
exit 1
"""
_WAIT_FOR_CERTIFICATE = f"""{_READERS}
systemctl restart "$2"
for turn in $(seq 60); do
  if [ ! -e "$1/requested.name" ] && valid "$1/reporter.pem"; then exit 0; fi
  sleep 1
done
echo "the cluster has not issued the certificate; see: trackbed status" >&2
exit 1
"""


@operation()
def approve(want: ReporterSetup) -> Commands:
    """Approve the request that the node shows over SSH, and no other, for its first certificate and for each later one."""
    shown = host.get_fact(NodeCredentials)
    if shown.certificate and not shown.request:
        host.noop("the node has a certificate and requests no other")
        return
    yield script(_WAIT_FOR_REQUEST, STATE_FOLDER)
    approval = Approval()
    yield FunctionCommand(_approve, (want, host.get_fact(NodeCredentials), approval), {})
    if approval.given:
        yield script(_WAIT_FOR_CERTIFICATE, STATE_FOLDER, UNIT)


@define
class Approval:
    """Carries from the function that approves to the next command whether a request was approved."""

    given: bool = False


def _approve(state: State, host: Host, want: ReporterSetup, shown: Credentials, approval: Approval) -> bool:
    refused = _refused(host, want, shown)
    if refused is None:
        approval.given = True
        return True
    message = f"{KUBERNETES.name}.kubeconfig: {shown.request} cannot be approved: {refused}"
    if not shown.certificate:
        return fail(host, message)
    # The present certificate is still valid. The deploy may run on a host without a kubeconfig, so this is no failure.
    warn(host, message)
    return True


def _refused(host: Host, want: ReporterSetup, shown: Credentials) -> str | None:
    """Approve the node's request; why that failed, or None."""
    if not shown.request:
        return None  # it was approved meanwhile
    if deploys_itself(host):
        return f"only a control host can do that; {BY_CONTROL_HOST}"
    if shared := shared_kubeconfig(host, KUBERNETES.name):
        return shared
    from fleet import credentials

    try:
        credentials.approve(want.key.kubeconfig, want.node, shown.request, shown.csr)
    except credentials.NotGiven as error:
        return str(error)
    return None
