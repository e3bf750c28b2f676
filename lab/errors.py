"""The exceptions that this package raises for people to read."""


class LabError(Exception):
    """An error with what happened, where, and the remedy. It is shown without a traceback."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}\n{remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy


class BadInput(LabError):
    """The arguments are wrong, and nothing was done."""
