"""What holds for all tests.

Property tests draw the same examples in every run, so that a result can be had again; `make fuzz` (or the variable
`GRPO_NB_FUZZ=20`) draws new ones, that many times more of them.
"""

import gc
import os
import signal

from hypothesis import settings

os.environ.pop("TQDM_DISABLE", None)  # what bars write is read
FUZZ = int(os.environ.get("GRPO_NB_FUZZ") or 0)
settings.register_profile("fixed", derandomize=True, database=None, deadline=None)
settings.register_profile("fuzz", deadline=None, print_blob=True)
settings.load_profile("fuzz" if FUZZ else "fixed")

# A shell that starts the tests in the background makes them ignore Ctrl-C; the tests of interrupts need it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish():
    gc.freeze()  # modules stay: no collection has to look at them
    gc.set_threshold(20_000, 20, 20)  # and what a training makes is seldom a circle


# slow fixtures: the files that use them are dealt first, each to one process
SHARED = ("killed", "two_ranks", "server")


def pytest_collection_modifyitems(items):
    "What takes long begins; fuzzing draws more examples per property."
    items.sort(key=lambda item: not set(SHARED) & set(getattr(item, "fixturenames", ())))
    for item in items if FUZZ else ():
        test = getattr(item, "obj", None)
        if getattr(test, "is_hypothesis_test", False):
            old = test._hypothesis_internal_use_settings
            more = settings(old, max_examples=old.max_examples * FUZZ)
            test._hypothesis_internal_use_settings = more
