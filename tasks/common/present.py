"""Which of some paths exist on a node."""

from __future__ import annotations

from pyinfra.api.command import StringCommand

from tasks.common.facts import Lines


class Present(Lines):
    """The given paths that exist. A link counts, wherever it leads."""

    def command(self, paths: tuple[str, ...]) -> StringCommand:
        """Test each path."""
        return self.script('for path; do if [ -e "$path" ] || [ -L "$path" ]; then echo "$path"; fi; done', *paths)
