"""pyinfra's settings; its command line overrides them. It reads them here and nowhere else."""

from pyinfra import config, state

from tasks.common import ahead, progress, quick, shard

config.REQUIRE_PYINFRA_VERSION = ">=3.10,<3.11"
# Hosts at once. pyinfra's own default is 20 for each CPU of the control host, which says nothing of the network.
config.PARALLEL = 64
# Stop for all when more than so many percent have failed: then the fault is not the node's.
config.FAIL_PERCENT = 10
# Seconds; a node under load answers late.
config.CONNECT_TIMEOUT = 20

shard.limit(state)
progress.show(state)
ahead.learn(state)
quick.replace()
