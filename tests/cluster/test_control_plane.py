"""The control plane of the lab: the properties on which other suites rely."""

import base64
import json
import stat

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from lab.cluster.control_plane import ControlPlane
from lab.cluster.programs import kubernetes_version
from lab.node import wait
from tests.cluster.objects import manifest


def test_the_control_plane_has_the_requested_version(control_plane: ControlPlane) -> None:
    assert json.loads(control_plane.kubectl("get", "--raw=/version"))["gitVersion"] == kubernetes_version()


def test_only_the_owner_can_read_the_control_planes_secrets(control_plane: ControlPlane) -> None:
    readable = [
        file
        for file in (control_plane.admin, *control_plane.authority.folder.glob("*.key"))
        if stat.S_IMODE(file.stat().st_mode) != 0o600
    ]
    assert readable == []


def test_a_users_certificate_is_its_name_and_its_groups(control_plane: ControlPlane) -> None:
    someone = control_plane.identity("trackbed:node:someone", ["some-group"])
    user = control_plane.kubectl("auth", "whoami", "-o", "jsonpath={.status.userInfo}", kubeconfig=someone)
    assert '"trackbed:node:someone"' in user
    assert '"some-group"' in user
    assert control_plane.try_kubectl("get", "nodes", kubeconfig=someone).returncode != 0


def test_writes_to_nodes_are_in_the_audit_log_with_their_bodies(control_plane: ControlPlane) -> None:
    control_plane.apply(manifest("v1", "Node", "audited"))
    control_plane.kubectl("label", "node", "audited", "colour=green")
    patches = [event for event in control_plane.audit() if event["verb"] == "patch"]
    assert any(
        event["objectRef"].get("name") == "audited"
        and event["requestObject"] == {"metadata": {"labels": {"colour": "green"}}}
        for event in patches
    )
    control_plane.kubectl("delete", "node", "audited")


def test_certificate_requests_are_signed_once_approved(control_plane: ControlPlane) -> None:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "trackbed:node:signed")])
    request = x509.CertificateSigningRequestBuilder().subject_name(name)
    pem = request.sign(ec.generate_private_key(ec.SECP256R1()), hashes.SHA256()).public_bytes(
        serialization.Encoding.PEM
    )
    signer = {"signerName": "kubernetes.io/kube-apiserver-client", "usages": ["client auth"]}
    spec = {"request": base64.b64encode(pem).decode(), **signer}
    control_plane.apply(manifest("certificates.k8s.io/v1", "CertificateSigningRequest", "signed", spec=spec))
    control_plane.kubectl("certificate", "approve", "signed")
    wait(lambda: "certificate" in control_plane.get("csr", "signed")["status"], 30, "a certificate")


def test_the_control_plane_returns_after_an_outage_and_after_it_lost_everything(control_plane: ControlPlane) -> None:
    control_plane.apply(manifest("v1", "Node", "lasting"))
    control_plane.kill_api_server()
    assert control_plane.try_kubectl("get", "nodes").returncode != 0
    control_plane.start_api_server()
    assert control_plane.get("node", "lasting")["metadata"]["name"] == "lasting"
    control_plane.empty()
    assert control_plane.get("nodes")["items"] == []
