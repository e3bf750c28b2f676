"""pyinfra's questions, where there is no terminal."""

from __future__ import annotations

from pyinfra.api.exceptions import PyinfraError


def need_answers() -> None:
    """For config.py: without a terminal, as in a job of cron, a question of pyinfra ends the deploy with a message."""
    # Not above: the import replaces Python's threads by gevent's. pyinfra's command line, which runs this, has done so.
    from pyinfra_cli import cli  # type: ignore[import-untyped]

    confirm = cli._do_confirm

    def confirm_or_end(question: str) -> bool:
        try:
            return bool(confirm(question))
        except EOFError:
            raise PyinfraError("there is no terminal to answer; give -y, with which pyinfra does not ask") from None

    cli._do_confirm = confirm_or_end
