"""nbdev_test with a process of its own for every notebook.

Workers of `nbdev_test` run one notebook after another, so that a name that one registers, or a method that it replaces in
an imported class, would reach the next; which notebooks meet depends on the machine.
"""

import multiprocessing
import sys

import matplotlib.pyplot  # noqa: F401  loaded once, before the processes divide
import nbdev.test
import pandas  # noqa: F401
import torch  # noqa: F401
import transformers  # noqa: F401


def one_process_each(function, files, n_workers, pause=0, **kwargs):
    with multiprocessing.get_context("fork").Pool(n_workers, maxtasksperchild=1) as pool:
        results = [pool.apply_async(function, (f,), kwargs) for f in files]
        return [r.get() for r in results]


nbdev.test.parallel = one_process_each
sys.exit(nbdev.test.nbdev_test(n_workers=2, timing=True))
