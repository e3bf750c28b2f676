"""What all tests stand on."""

import signal

# A shell's background job starts with Ctrl-C ignored, and so would everything that tests start and end by it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
