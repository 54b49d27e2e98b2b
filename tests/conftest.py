"""What holds for all tests."""

import signal

# A runner that was started in the background of a script ignores Ctrl-C, and what it starts inherits that: the tests that
# interrupt a program would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
