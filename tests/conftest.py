"""Fixtures and settings of all tests."""

import signal

from hypothesis import HealthCheck, settings

# An example may take long on a busy machine, and is no worse for it.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

# A shell's background job starts with Ctrl-C ignored, one under nohup with the hangup, and so would everything that tests start
# and end by these signals. One that is handled here has its default effect there.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)
