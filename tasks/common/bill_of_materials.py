"""Writes the bill of materials of what the deploy puts on a node: `python -m tasks.common.bill_of_materials x86_64`.

CycloneDX 1.6 as JSON. It is made from the agent's archive, so it lists what the archive really contains.
"""

from __future__ import annotations

import hashlib
import tarfile
from collections.abc import Iterator
from email.message import Message
from email.parser import BytesParser
from pathlib import Path, PurePosixPath
from uuid import NAMESPACE_URL, uuid5

import click
from cyclonedx.contrib.license.factories import LicenseFactory
from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import License
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from pyinfra.api.exceptions import DeployError

from tasks.common import archive

# Without an SPDX expression a package gives its licence as free text; the first line is taken as the name.
LONGEST_LICENSE = 80


def bill(file: Path, machine: str) -> Bom:
    """The bill of materials of an archive of the agent."""
    content = hashlib.sha256(file.read_bytes()).hexdigest()
    agent = Component(
        name="trackbed-agent",
        version=archive.version(machine),
        type=ComponentType.APPLICATION,
        bom_ref="trackbed-agent",
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=content)],
    )
    made = Bom(components=list(libraries(file)))
    made.metadata.component = agent
    # The same archive always gives the same bytes, except for the time at which the bill was made.
    made.serial_number = uuid5(NAMESPACE_URL, f"sha256:{content}")
    made.register_dependency(agent, list(made.components))
    return made


def libraries(file: Path) -> Iterator[Component]:
    """The Python libraries in an archive, by the metadata of each."""
    with tarfile.open(file) as tar:
        for entry in tar:
            path = PurePosixPath(entry.name)
            if path.name == "METADATA" and path.parent.suffix == ".dist-info" and (text := tar.extractfile(entry)):
                metadata = BytesParser().parse(text, headersonly=True)
                name, version = metadata["Name"], metadata["Version"]
                yield Component(
                    name=name,
                    version=version,
                    type=ComponentType.LIBRARY,
                    bom_ref=f"{name}@{version}",
                    purl=PackageURL("pypi", name=name.lower().replace("_", "-"), version=version),
                    licenses=_licenses(metadata),
                )


def _licenses(metadata: Message) -> list[License]:
    expression = metadata["License-Expression"]
    classifiers = [
        line.rpartition(" :: ")[2] for line in metadata.get_all("Classifier", []) if line.startswith("License ::")
    ]
    text = (
        expression or (metadata["License"] or "").strip().partition("\n")[0][:LONGEST_LICENSE] or ", ".join(classifiers)
    )
    return [LicenseFactory().make_from_string(text)] if text else []


@click.command()
@click.argument("machine", type=click.Choice(archive.MACHINES))
def main(machine: str) -> None:
    """Print the bill of what a node of this MACHINE (`uname -m`) gets."""
    try:
        file = archive.build(machine)
    except DeployError as error:
        raise click.ClickException(str(error)) from None
    click.echo(JsonV1Dot6(bill(file, machine)).output_as_string(indent=2))


if __name__ == "__main__":
    main()
