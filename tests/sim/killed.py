"""The end of an agent that is killed."""


class Killed(BaseException):
    """The agent is killed; what it had in memory is lost."""
