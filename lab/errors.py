"""The one exception that this package raises on purpose."""


class LabError(Exception):
    """What happened and where, and what to do about it; shown to a person without a traceback."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what}\n{remedy}" if remedy else what)
        self.what = what
        self.remedy = remedy


class BadInput(LabError):
    """The person asked for something that cannot be; nothing was done."""
