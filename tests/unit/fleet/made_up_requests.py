"""Requests for certificates that Python and Go may read differently, made up from a seed.

`python -m tests.unit.fleet.made_up_requests --cases 1000000` asks both of each: what `trackbed fleet approve` would
approve must be read by Go, as the API server and its signer read it, with the same subject and key, and with nothing else.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from attrs import frozen
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec, utils
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from lightkube.models.certificates_v1 import CertificateSigningRequestSpec
from lightkube.models.meta_v1 import ObjectMeta
from lightkube.resources.certificates_v1 import CertificateSigningRequest

from agent.report import names
from fleet.approval import SIGNER, KnownNodes, verdicts
from lab.go.go_programs import Build, ensure

READER = Build("read-request", (".",), Path(__file__).parents[3] / "lab" / "go" / "read-request", usual_s=10)
BATCH = 20_000

USER = f"{names.NODE_USER}a"
KNOWN = KnownNodes(expected={"a"}, joined={"a"})
KEY = ec.derive_private_key(0x1234567, ec.SECP256R1())
OTHER_KEY = ec.derive_private_key(0x7654321, ec.SECP256R1())

CN, ORGANIZATION = "0603550403", "060355040a"
P256 = "301306072a8648ce3d020106082a8648ce3d030107"
EXTENSION_REQUEST = "06092a864886f70d01090e"
CHALLENGE = "06092a864886f70d010907"
STRINGS = (0x0C, 0x13, 0x14, 0x16, 0x1A, 0x1C, 0x1E, 0x04)
"""Tags of strings: UTF8, Printable, T61, IA5, Visible, Universal, BMP, and octets."""


def der(tag: int, *parts: bytes, long: bool = False) -> bytes:
    """A value in DER. With ``long`` its length takes more bytes than necessary, which only BER allows."""
    content = b"".join(parts)
    if len(content) < 0x80 and not long:
        return bytes([tag, len(content)]) + content
    length = len(content).to_bytes((len(content).bit_length() + 7) // 8 or 1, "big")
    length = b"\0" + length if long and len(content) >= 0x80 else length
    return bytes([tag, 0x80 | len(length)]) + length + content


@frozen
class Maker:
    """Makes up requests by random choices."""

    chance: random.Random

    def seldom(self, share: float = 0.1) -> bool:
        """True, as often as the share says."""
        return self.chance.random() < share

    def attribute(self, oid: str, text: str) -> bytes:
        tag = self.chance.choice(STRINGS) if self.seldom() else 0x0C
        codec = {0x1E: "utf-16-be", 0x1C: "utf-32-be"}.get(tag, "utf-8")
        value = der(tag, text.encode(codec), long=self.seldom(0.02))
        return der(0x30, bytes.fromhex(oid), value)

    def named(self, user: str) -> str:
        """The name, or one that looks like it."""
        likes = (
            f"{user}\0",
            f"\0{user}",
            f"{user} ",
            f"{user}\n",
            user.upper(),
            f"\u202e{user}",
            user.replace("a", "\u0430"),
        )
        return self.chance.choice(likes) if self.seldom(0.05) else user

    def subject(self, user: str) -> bytes:
        names = [self.attribute(CN, self.named(user))]
        if self.seldom():
            names.append(self.attribute(ORGANIZATION, "system:masters"))
        if self.seldom():
            names.append(self.attribute(CN, "system:kube-controller-manager"))
        self.chance.shuffle(names)
        sets = [der(0x31, *names)] if self.seldom() else [der(0x31, each) for each in names]
        return der(0x30, *sets, *([der(0x31)] if self.seldom(0.02) else []))

    def key(self, key: ec.EllipticCurvePrivateKey) -> bytes:
        compressed = self.seldom(0.05)
        form = PublicFormat.CompressedPoint if compressed else PublicFormat.UncompressedPoint
        point = key.public_key().public_bytes(Encoding.X962, form)
        parameters = bytes.fromhex(P256)
        return der(0x30, parameters, self.bits(point), long=self.seldom(0.02))

    def bits(self, content: bytes) -> bytes:
        """A bit string; seldom one that does not end with a byte, or has another byte."""
        unused = self.chance.choice((1, 7, 8)) if self.seldom(0.02) else 0
        return der(0x03, bytes([unused]), content, b"\0" * self.seldom(0.02), long=self.seldom(0.02))

    def signature(self, key: ec.EllipticCurvePrivateKey, content: bytes) -> bytes:
        """A signature in DER; seldom with a number that is longer than it must be, or one byte too short and so negative."""
        numbers = []
        for number in utils.decode_dss_signature(key.sign(content, ec.ECDSA(hashes.SHA256()))):
            text = number.to_bytes(number.bit_length() // 8 + 1, "big")
            text = b"\0" + text if self.seldom(0.02) else text
            numbers.append(der(0x02, text[1:] if self.seldom(0.02) else text))
        return der(0x30, *numbers, b"\5\0" * self.seldom(0.02), long=self.seldom(0.02))

    def attributes(self) -> bytes:
        attributes = []
        for oid, share in ((EXTENSION_REQUEST, 0.15), (EXTENSION_REQUEST, 0.05), (CHALLENGE, 0.05)):
            if self.seldom(share):
                name = der(0x30, der(0x82, b"kubernetes.default"))
                extension = der(0x30, bytes.fromhex("0603551d11"), der(0x04, name))
                extensions = der(0x30, *([extension] * self.chance.choice((0, 1, 2))))
                attributes.append(
                    der(0x30, bytes.fromhex(oid), der(0x31, *([extensions] * self.chance.choice((0, 1, 2)))))
                )
        return der(0xA0, *attributes) if attributes or not self.seldom(0.05) else b""

    def flipped(self, text: bytes, share: float) -> bytes:
        """With a byte changed, added or taken out, as often as the share says."""
        while text and self.seldom(share):
            at, kind = self.chance.randrange(len(text)), self.chance.randrange(3)
            new = bytes([self.chance.randrange(256)]) if kind else b""
            text = text[:at] + new + text[at + (kind < 2) :]
        return text

    def request(self, user: str, key: ec.EllipticCurvePrivateKey) -> bytes:
        """A request in DER, or in what is nearly DER, signed by its key."""
        version = der(0x02, b"\1" if self.seldom(0.02) else b"\0")
        parts = (version, self.subject(user), self.key(key), self.attributes())
        content = self.flipped(der(0x30, *parts, b"\5\0" * self.seldom(0.02), long=self.seldom(0.02)), 0.1)
        signed = self.bits(self.signature(key, content))
        algorithm = "300c06082a8648ce3d0403020500" if self.seldom(0.03) else "300a06082a8648ce3d040302"
        whole = der(0x30, content, bytes.fromhex(algorithm), signed, b"\5\0" * self.seldom(0.02))
        return self.flipped(whole + b"\0" * self.seldom(0.02), 0.02)

    def block(self) -> bytes:
        """A request in PEM: of the node itself, or of somebody whom the cluster trusts more."""
        mine = not self.seldom(0.25)
        user, key = (USER, KEY) if mine else ("system:kube-controller-manager", OTHER_KEY)
        text = base64.b64encode(self.request(user, key)).decode()
        width = self.chance.choice((1, 60, 63, 65, 76, 4096)) if self.seldom(0.05) else 64
        end = self.chance.choice(("\r\n", " \n", "\n\n", "\t\n", "\r")) if self.seldom(0.05) else "\n"
        body = "".join(text[start : start + width] + end for start in range(0, len(text), width))
        labels = ("NEW CERTIFICATE REQUEST", "CERTIFICATE", "X509 CRL", "certificate request", "")
        label = self.chance.choice(labels) if self.seldom(0.05) else "CERTIFICATE REQUEST"
        closing = self.chance.choice(labels) if self.seldom(0.03) else label
        header = "Proc-Type: 4,ENCRYPTED\n\n" if self.seldom(0.03) else ""
        return f"-----BEGIN {label}-----{end}{header}{body}-----END {closing}-----{end}".encode()

    def beside(self) -> bytes:
        """What may stand before, between and after blocks."""
        texts = (
            b"x ",
            b" ",
            b"\n",
            b"x\n",
            b"\0",
            b"-----BEGIN ",
            b"-----END X-----\n",
            b"-----",
            b"\xef\xbb\xbf",
            b"\t",
        )
        return (
            b"".join(self.chance.choice(texts) for _ in range(self.chance.choice((1, 1, 2)))) if self.seldom() else b""
        )

    def text(self) -> str:
        """A request as the API has it."""
        parts = [self.beside()]
        for _ in range(2 if self.seldom(0.3) else 1):
            parts += [self.block(), self.beside()]
        return base64.b64encode(self.flipped(b"".join(parts), 0.05)).decode()


def made_up(seed: int) -> Iterator[str]:
    """Requests without end; the same for the same seed."""
    maker = Maker(random.Random(seed))  # noqa: S311  no secret
    while True:
        yield maker.text()


def approves(text: str) -> bool:
    """Whether `trackbed fleet approve` would approve it, if node a asked for it."""
    spec = CertificateSigningRequestSpec(
        request=text, signerName=SIGNER, usages=["client auth"], expirationSeconds=86400, username=USER
    )
    request = CertificateSigningRequest(metadata=ObjectMeta(name="made-up"), spec=spec)
    return [verdict.action for verdict in verdicts([request], KNOWN)] == ["approve"]


def go_reads(texts: Sequence[str]) -> list[dict[str, Any]]:
    """What Go reads in each."""
    program = ensure(READER) / "read-request"
    done = subprocess.run([program], input="\n".join(texts) + "\n", capture_output=True, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def is_mine(read: dict[str, Any]) -> bool:
    """Whether Go reads node a's name and key, and nothing else."""
    key = KEY.public_key().public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    subject = der(0x30, der(0x31, der(0x30, bytes.fromhex(CN), der(0x0C, USER.encode()))))
    wanted = {"error": "", "name": USER, "groups": 0, "extras": 0}
    same = all(read[word] == value for word, value in wanted.items())
    return same and base64.b64decode(read["key"]) == key and base64.b64decode(read["subject"]) == subject


@frozen
class Compared:
    """How many were approved, how many Go reads as node a's own; ``wrong`` were approved, and Go reads them otherwise."""

    cases: int
    approved: int
    mine: int
    wrong: tuple[str, ...]


def compare(texts: Sequence[str], judge: Callable[[str], bool] = approves) -> Compared:
    """Judge each request, and have Go read it."""
    verdict = [judge(text) for text in texts]
    mine = [is_mine(read) for read in go_reads(texts)]
    wrong = [text for text, good, same in zip(texts, verdict, mine, strict=True) if good and not same]
    return Compared(len(texts), sum(verdict), sum(mine), tuple(wrong))


def main() -> None:
    """Compare as many as are asked for; exit code 1 if one is approved that Go reads otherwise."""
    options = argparse.ArgumentParser(description=main.__doc__)
    options.add_argument("--cases", type=int, default=1_000_000)
    options.add_argument("--seed", type=int, default=1)
    given = options.parse_args()
    source, done, approved, mine = made_up(given.seed), 0, 0, 0
    while done < given.cases:
        compared = compare(list(islice(source, min(BATCH, given.cases - done))))
        done, approved, mine = done + compared.cases, approved + compared.approved, mine + compared.mine
        sys.stdout.write(f"{done} cases: {approved} approved, {mine} read by Go as the node's own\n")
        if compared.wrong:
            sys.exit(f"approved, and read otherwise by Go: {compared.wrong[0]}")


if __name__ == "__main__":
    main()
