import pytest

from agent.report.printable import printable


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain text, ärger", "plain text, ärger"),
        ("\x1b[2Jgone", "\\x1b[2Jgone"),
        ("\x9b31m", "\\x9b31m"),
        ("a\rb\nc\x00\x7f", "a\\rb\\nc\\x00\\x7f"),
        ("a\u202eb\u2028", "a\\u202eb\\u2028"),
        ("\ud800", "\\ud800"),
    ],
)
def test_control_characters_are_shown_as_escapes(text: str, shown: str) -> None:
    assert printable(text) == shown
