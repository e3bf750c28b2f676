"""The certificate authorities of a cluster, which the reporter trusts: one, or two while the cluster changes it."""

from __future__ import annotations

import re
from pathlib import Path

from cryptography import x509

_PEM = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)


def read_authorities(file: Path) -> str:
    """The text of a PEM file, with one line break at its end.

    :raises OSError: it cannot be read.
    :raises ValueError: it has no certificates, or one that cannot be read.
    """
    text = file.read_text().rstrip("\n") + "\n"
    x509.load_pem_x509_certificates(text.encode())
    return text


def removes_authorities(have: str, want: str) -> bool:
    """Whether a node trusts an authority that is not wanted any more. It may have signed the node's certificate.

    If the wanted ones only add one, the certificate stays valid: the cluster is about to change its authority.
    """
    trusted = set(_PEM.findall(have))
    return not trusted or not trusted <= set(_PEM.findall(want))
