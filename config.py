"""pyinfra's settings. Options of its command line override them."""

from pyinfra import config

from tasks.common import questions, replacements

config.REQUIRE_PYINFRA_VERSION = ">=3.10,<3.11"
# Hosts at the same time. pyinfra's default is 20 for each CPU of the control host, but the network is the limit.
config.PARALLEL = 64
# Seconds. A busy node answers late.
config.CONNECT_TIMEOUT = 20

questions.check_options()
replacements.replace()
