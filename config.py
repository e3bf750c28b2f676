"""pyinfra's settings. Options of its command line override them."""

from pathlib import Path

from pyinfra import config
from pyinfra.api.exceptions import PyinfraError

import tasks

# pyinfra of one checkout's environment, run in another checkout, would run this one's deploy with that one's tasks.
_here, _imported = Path(__file__).parent.resolve(), Path(tasks.__file__).parents[1].resolve()
if _here != _imported:
    raise PyinfraError(
        f"this pyinfra belongs to the checkout {_imported}, and runs in {_here}: run `make control` in {_here} and its "
        f"{_here / '.venv/bin/pyinfra'}, or change into {_imported}"
    )

from tasks.common import questions, replacements  # noqa: E402  another checkout may lack these

config.REQUIRE_PYINFRA_VERSION = ">=3.10,<3.11"
# Hosts at the same time. pyinfra's default is 20 for each CPU of the control host, but the network is the limit.
config.PARALLEL = 64
# Seconds. A busy node answers late.
config.CONNECT_TIMEOUT = 20
# The login user uploads files there. pyinfra would ask root's environment, which may have root's own folder (pam_tmpdir(8)).
config.TEMP_DIR = "/tmp"  # noqa: S108  what this means is in docs/security.md

# Before the options are checked, since it also replaces how pyinfra shows an error.
replacements.replace()
questions.check_options()
