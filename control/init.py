"""`trackbed init`."""

from __future__ import annotations

import shlex
from pathlib import Path

import click

from agent.runtime import version, write_atomically
from tasks.common.archive import ROOT
from tasks.common.site import PIN

INVENTORY = '''"""The servers of this site. Each list is a group of hosts, by the names to which the control host connects."""

servers: list[str] = []  # as ["gpu-01.example.net", "gpu-02.example.net"]
'''

SERVERS = '''"""What each host of the group `servers` should be."""

# One NIC with eight VFs on each server. `trackbed inspect --as-inventory` writes this from a running server.
# nics = [{"name": "rail0", "select": {"pci": "0000:18:00.0"}, "vfs": {"count": 8}}]
'''

README = """# The servers of this site

Trackbed brings them to the state that the files here describe. Run its commands in its checkout, of the version that
`{pin}` names:

    pyinfra {site}/inventories/prod.py deploy.py --dry      # what would change
    pyinfra {site}/inventories/prod.py deploy.py
    trackbed explain HOST --inventory {site}/inventories/prod.py

To upgrade, check out the new version, read `--dry`, write the version into `{pin}`, deploy.
"""

# What a deploy and Python leave in a site.
IGNORED = "__pycache__/\npyinfra-debug.log\n"


@click.command()
@click.argument("site", type=click.Path(path_type=Path, file_okay=False))
def init(site: Path) -> None:
    """Make a folder for your inventories and their data, outside of Trackbed's checkout.

    Files that exist stay as they are. Keep the folder under version control.

    Exit code: 0 done, 1 the folder cannot be written.

    Example: trackbed init ~/fleet
    """
    root = site.expanduser().resolve()
    if root == ROOT or ROOT in root.parents:
        raise click.ClickException(
            f"{root} is in the checkout of Trackbed; give a folder outside of it, such as ~/fleet"
        )
    home = Path.home()
    in_home = home in root.parents
    shown = f"~/{shlex.quote(str(root.relative_to(home)))}" if in_home else shlex.quote(str(root))
    files = {
        "inventories/prod.py": INVENTORY,
        "group_data/servers.py": SERVERS,
        "README.md": README.format(site=shown, pin=PIN),
        ".gitignore": IGNORED,
        PIN: f"{version()}\n",
    }
    for name, text in files.items():
        path = root / name
        try:
            if path.exists():
                click.echo(f"{path} exists, and stays as it is")
                continue
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, text, 0o644)
        except OSError as error:
            raise click.ClickException(f"{path} cannot be written: {error.strerror}; give another folder") from None
        click.echo(f"{path} is written")
    click.echo(
        f"next: write your servers into {root / 'inventories/prod.py'}, and their NICs into group_data/servers.py"
    )
