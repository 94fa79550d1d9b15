"A shell that starts the tests in the background makes them ignore Ctrl-C; the tests of interrupts need it."

import signal

signal.signal(signal.SIGINT, signal.default_int_handler)
