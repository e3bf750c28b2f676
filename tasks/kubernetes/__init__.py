"""Gives the reporter its settings, and its first token for the API server.

The API server makes a token for the deploy that is bound to the Node, by the kubeconfig of the control host. After that the
reporter renews the token itself. The deploy brings another one if the API server refuses the token or it has expired.
"""

from __future__ import annotations

import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from attrs import Attribute, define, field, frozen
from attrs.validators import and_, deep_iterable
from cryptography import x509
from pyinfra.api.command import FunctionCommand, StringCommand
from pyinfra.api.deploy import deploy
from pyinfra.api.exceptions import DeployError
from pyinfra.api.host import Host
from pyinfra.api.operation import operation
from pyinfra.api.state import State
from pyinfra.context import host

from agent.report import published
from agent.reporter.kubernetes.tokens import Claims, claims_of
from agent.reporter.settings import Quarantine, Settings, to_json
from agent.spec.node import NodeSpec
from agent.spec.validators import Matches, Within
from tasks.common import site
from tasks.common.commands import Commands, fail, script, warn
from tasks.common.connection import BY_CONTROL_HOST, deploys_itself
from tasks.common.data import Key, record, without_password
from tasks.common.facts import FactBase
from tasks.common.systemd_reload import RESTART
from tasks.common.texts import Texts, replace
from tasks.kubernetes.clusters import shared_kubeconfig
from tasks.kubernetes.label_keys import EXTENDED_RESOURCE

SETTINGS = str(published.SETTINGS)
AUTHORITY = "/etc/trackbed/cluster-ca.pem"
SECRET = "/etc/trackbed/kubernetes-secret"  # noqa: S105  the name of a file
STATE_FOLDER = "/var/lib/trackbed-reporter"
DAY = 86400
LONGEST_EVICT_AFTER = 30 * DAY
PUBLISHED = str(published.PATH)
UNIT = "trackbed-reporter.service"
_CERTIFICATE = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


def _api_server(_: object, attribute: Attribute[Any], url: str) -> None:
    with suppress(ValueError):
        address = urlsplit(url)
        beyond = address.path.strip("/") or address.query or address.fragment
        if address.scheme == "https" and address.hostname and address.port != 0 and not beyond:
            return
    raise ValueError(f"{attribute.name}: {url!r} is not an API server's URL; give one as https://10.0.0.1:6443")


_resource = Matches(EXTENDED_RESOURCE, "give an extended resource, as rdma/hca_shared_devices_b")


@frozen
class Kubernetes:
    """The inventory's key.

    ``server``: the API server's URL for nodes. ``ca_file``: the cluster's certificate authority, a file on the control host.
    ``kubeconfig``: on the control host; default $KUBECONFIG or ~/.kube/config. ``days``: the lifetime of a token.
    ``required_resources``: they must be allocatable before the taint is removed. ``taint_lifted_by``: who sets and removes it.
    ``quarantine``: how the devices of a bad NIC are tainted; None: they are not. ``maintain_nics``: a deploy takes a NIC from
    its pods for a change that waits for them.
    """

    server: str = field(validator=and_(without_password, _api_server))
    ca_file: str
    kubeconfig: str | None = None
    days: int = field(default=365, validator=Within(1, 365, "days"))
    required_resources: tuple[str, ...] = field(default=(), validator=deep_iterable(_resource))
    taint_lifted_by: Literal["reporter", "node-readiness-controller"] = "reporter"
    quarantine: Quarantine | None = None
    maintain_nics: bool = False

    def __attrs_post_init__(self) -> None:
        if self.quarantine and not 0 <= (self.quarantine.evict_after or 0) <= LONGEST_EVICT_AFTER:
            raise ValueError(f"quarantine.evict_after: give seconds, 0 to {LONGEST_EVICT_AFTER}, or None")


KUBERNETES: Key[Kubernetes | None] = Key("kubernetes", None, record(Kubernetes))


@frozen
class ReporterSetup:
    """What a node gets: the texts of two files, and the inventory's key, which says how it gets its token."""

    key: Kubernetes
    node: str
    settings: str
    authority: str


def wanted(spec: NodeSpec) -> ReporterSetup | None:
    """The current host's settings for Kubernetes; None: its reporter publishes nothing to Kubernetes.

    :raises DeployError: the certificate authority's file cannot be read.
    """
    key = KUBERNETES.here()
    if key is None:
        return None
    asked = (key.required_resources, key.taint_lifted_by, key.days, key.quarantine)
    settings = Settings(spec.node_name, key.server, AUTHORITY, *asked)
    return ReporterSetup(key, spec.node_name, to_json(settings), _authority(key))


def kubeconfig_of(key: Kubernetes) -> str | None:
    """The kubeconfig's path; None: the control host's default."""
    return str(site.path(key.kubeconfig)) if key.kubeconfig else None


def _authority(key: Kubernetes) -> str:
    file = site.path(key.ca_file)
    if deploys_itself(host) and not file.exists():  # it is on the control host
        if not (brought := host.get_fact(Texts, paths=(AUTHORITY,)).get(AUTHORITY)):
            raise DeployError(
                f"{host.name}.{KUBERNETES.name}.ca_file: the node has neither {file} nor {AUTHORITY}; {BY_CONTROL_HOST}"
            )
        return str(brought)
    try:
        return _read_authorities(file)
    except (OSError, ValueError) as error:
        said = error.strerror if isinstance(error, OSError) else error
        raise DeployError(
            f"{host.name}.{KUBERNETES.name}.ca_file: {file}: {said}; give the cluster's authority, a PEM file"
        ) from None


def _read_authorities(file: Path) -> str:
    """The text of a PEM file, with one line break at its end.

    :raises OSError: it cannot be read.
    :raises ValueError: it has no certificates, or one that cannot be read.
    """
    text = file.read_text().rstrip("\n") + "\n"
    x509.load_pem_x509_certificates(text.encode())
    return text


def _removes_authorities(have: str, want: str) -> bool:
    """Whether a node trusts an authority that is not wanted any more. It may have signed the node's certificate.

    If the wanted ones only add one, the certificate stays valid: the cluster is about to change its authority.
    """
    trusted = set(_CERTIFICATE.findall(have))
    return not trusted or not trusted <= set(_CERTIFICATE.findall(want))


@frozen
class Credentials:
    """The tokens that the node has. ``brought``: that of the deploy; ``renewed``: that of the reporter.

    ``secret``: the file of the deploy's token exists. ``kept``: the reporter keeps a token, or a certificate from before.
    ``refused``: the API server refuses these credentials.
    """

    brought: Claims = field(factory=Claims)
    renewed: Claims = field(factory=Claims)
    secret: bool = False
    kept: bool = False
    refused: bool = False

    def are_valid(self, node: str, now: float) -> bool:
        """Whether the reporter can publish with these. It uses the token of its Node that was issued last."""
        own = [each for each in (self.brought, self.renewed) if each.uid and each.node == node]
        return not self.refused and any(each.expires > now for each in own)


# Root reads files that the reporter writes. A hostile reporter could replace them by a link to a file of root's, or by a pipe
# that never ends. So dd follows no link, and does not wait for a pipe. It prints a token's claims (the second part of three),
# and not its signature, which is the secret.
_CREDENTIALS = """
content() { dd if="$1" iflag=nofollow,nonblock bs=65536 count=1 status=none 2>/dev/null; }
if [ -f "$1" ]; then echo "brought $(cut -d. -f2 "$1")"; fi
for file in "$2/token" "$2/reporter.pem" "$2"/requested.*; do
  if [ -e "$file" ] || [ -L "$file" ]; then echo kept yes; fi
done
echo "renewed $(content "$2/token" | cut -d. -f2 | head -n1)"
echo "published $(content "$3" | tr -d '\\r\\n')"
"""


class NodeCredentials(FactBase[Credentials]):
    """The tokens that the node has."""

    default = Credentials
    shell = _CREDENTIALS
    words = (SECRET, STATE_FOLDER, PUBLISHED)

    def process(self, output: list[str]) -> Credentials:
        """Parse lines of a word and a value."""
        by_word = {word: value for word, _, value in (line.partition(" ") for line in output)}
        brought, renewed = (claims_of(by_word.get(word, "")) for word in ("brought", "renewed"))
        latest = published.parsed(by_word.get("published", ""))
        refused = latest is not None and latest.refused
        return Credentials(brought, renewed, "brought" in by_word, "kept" in by_word, refused)


@deploy("Kubernetes")
def configure(spec: NodeSpec) -> None:
    """Write the reporter's settings and its token; without the key `kubernetes`, remove them."""
    deliver(name="Settings and token", want=wanted(spec))


@define
class NewToken:
    """Carries the token from the function that gets it to the command that writes it; empty until then."""

    token: str = ""


# What the reporter keeps: its own token, and a certificate of an earlier version.
_FORGET = 'rm -f "$1"/token "$1"/reporter.pem "$1"/requested.*'

# What the reporter has kept so far goes: it was refused, or is of another cluster.
_KEEP = f"""
mkdir -p "${{1%/*}}"; umask 077; cat > "$1.new"; mv -T "$1.new" "$1"; shift
{_FORGET}; shift
"""


@operation()
def deliver(want: ReporterSetup | None) -> Commands:
    """Write the files that differ, and restart the reporter if it runs."""
    have = host.get_fact(Texts, paths=(SETTINGS, AUTHORITY))
    credentials = host.get_fact(NodeCredentials)
    if want is None:
        yield from replace(have, {})
        if credentials.secret:
            yield StringCommand("rm", "-f", SECRET)
        if credentials.kept:
            yield script(_FORGET, STATE_FOLDER)
        if not (have or credentials.secret or credentials.kept):
            host.noop("the reporter publishes nothing to Kubernetes")
        return
    # A token of another cluster is worth nothing in this one.
    moved = bool(have) and _removes_authorities(have.get(AUTHORITY, ""), want.authority)
    texts = {SETTINGS: want.settings, AUTHORITY: want.authority}
    needs_token = moved or not credentials.are_valid(want.node, time.time())
    if have == texts and not needs_token:
        host.noop("settings and token are as they should be")
        return
    if needs_token:
        new_token = NewToken()
        yield FunctionCommand(_get_token, (want, new_token), {})
        # On standard input the token is in no argument, no log, and no file of other users.
        keep = (SECRET, STATE_FOLDER, UNIT)
        yield script(_KEEP + RESTART if have == texts else _KEEP, *keep, stdin=new_token.token)
    yield from replace(have, texts, RESTART, UNIT)


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
    from fleet.api import Failed

    try:
        new_token.token = credentials.bound_token(kubeconfig_of(want.key), want.node, want.key.days * DAY)
    except credentials.NotJoined as error:
        # Before it joins, a node has no Node to which a token could be bound. That is no error.
        later = "once it has, run deploys/token.py, or deploy again; if it has, correct node_name (kubectl get nodes)"
        warn(host, f"{error.message}: {later}")
    except Failed as error:
        return fail(host, f"{KUBERNETES.name}.kubeconfig: no token for {want.node}: {error.message}")
    return True
