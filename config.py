"""pyinfra's settings. Options of its command line override them."""

from pyinfra import config, state

from tasks import disruption, time_limits
from tasks.common import connection, failures, inventory, lock, prefetch, progress, pyinfra_speed, questions, shard

config.REQUIRE_PYINFRA_VERSION = ">=3.10,<3.11"
# Hosts at the same time. pyinfra's default is 20 for each CPU of the control host, but the network is the limit.
config.PARALLEL = 64
# Seconds. A busy node answers late.
config.CONNECT_TIMEOUT = 20

connection.allow_open_files(state)
connection.fail_single_hosts()
connection.keep_host_keys()
failures.limit(state)
time_limits.bound_all()
failures.fail_alone()
# After the limits of open files and of failed hosts, which then count the hosts of the shard only.
shard.limit(state)
# After the shard, so that it is called before it: a shard may have no hosts.
inventory.check(state)
progress.show(state)
disruption.summarise(state)
questions.need_answers()
questions.refuse_answers_to_a_dry_run()
lock.exclude_others()
prefetch.enable(state)
pyinfra_speed.replace_functions()
