"""nbdev_test with a process of its own for every notebook.

Workers of `nbdev_test` run one notebook after another, so that a name that one registers, or a method that it replaces in
an imported class, would reach the next; which notebooks meet depends on the machine.
"""

import functools
import gc
import importlib
import multiprocessing
import sys

import nbdev.test

# what most notebooks import is loaded once, before the processes divide; the method works without the lab
LOADED = (
    "torch pandas matplotlib.pyplot scipy.stats omegaconf fastcore.test pandas.io.formats.style pyarrow.pandas_compat "
    "PIL.GifImagePlugin PIL.JpegImagePlugin PIL.PpmImagePlugin PIL.BmpImagePlugin IPython.core.application "
    "IPython.core.magics transformers.models.llama.modeling_llama transformers.models.auto.modeling_auto "
    "transformers.models.auto.tokenization_auto transformers.tokenization_utils_tokenizers "
    "pydantic.dataclasses pydantic.type_adapter pandas.plotting IPython.core.history "
    "grpo_nb.trainer grpo_nb.policies.tokens grpo_nb.verifiers"
).split()


def one_process_each(function, files, n_workers, pause=0, **kwargs):
    "Results in the order of the files; the folders whose notebooks train begin."
    begin = sorted(files, key=lambda f: f.parent.name not in ("applications", "tutorials", "nbs"))
    with multiprocessing.get_context("fork").Pool(n_workers, maxtasksperchild=1) as pool:
        results = {f: pool.apply_async(function, (f,), kwargs) for f in begin}
        return [results[f].get() for f in files]


for name in LOADED:
    importlib.import_module(name)
gc.freeze()  # the processes share these pages
gc.set_threshold(20_000, 20, 20)
nbdev.test.CaptureShell = functools.partial(
    nbdev.test.CaptureShell, mpl_format="png"
)  # as readers get it
nbdev.test.parallel = one_process_each
sys.exit(nbdev.test.nbdev_test(n_workers=2, timing=True))
