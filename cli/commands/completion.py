"""`trackbed completion`."""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

VARIABLE = "_TRACKBED_COMPLETE"
"""What the script sets for click to answer with completions; click derives it from the program's name."""


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that completes commands and options in a shell.

    \b
    bash:  trackbed completion bash > /etc/bash_completion.d/trackbed
    zsh:   trackbed completion zsh > /usr/share/zsh/site-functions/_trackbed
    fish:  trackbed completion fish > ~/.config/fish/completions/trackbed.fish

    Exit code: 0.

    Example: source <(trackbed completion bash)
    """
    made = get_completion_class(shell)
    assert made is not None  # noqa: S101  click has these three
    root = click.get_current_context().find_root().command
    click.echo(made(root, {}, "trackbed", VARIABLE).source())
