"Programs in processes of their own, forked from one that has loaded what takes seconds of a fresh start."

import atexit
import importlib
import multiprocessing
import os
import runpy
import sys
import time
from pathlib import Path

LOADED = "pytest hypothesis grpo_nb.all grpo_nb.cli matplotlib.pyplot scipy.stats torch.nested "
LOADED += "transformers.models.llama.modeling_llama transformers.tokenization_utils_tokenizers "
LOADED += "transformers.convert_slow_tokenizer omegaconf torch.profiler"
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(LOADED.split())


def _carry_out(out, env, argv, function, args):
    os.environ.update(env)
    sys.argv[1:] = map(str, argv)
    with open(out, "wb") as f:
        os.dup2(f.fileno(), 1), os.dup2(f.fileno(), 2)
    try:
        code = function(*args)
        sys.exit(code if isinstance(code, int) else None)
    finally:
        atexit._run_exitfuncs()  # as at the end of a program


def start(out, function, *args, env=(), argv=()):
    "A process that carries out the function; what it prints goes to the file `out`."
    process = FORKS.Process(target=_carry_out, args=(out, dict(env), argv, function, args))
    process.start()
    return process


def run(out, function, *args, **kw):
    "What was printed, when it has ended without an error."
    process = start(out, function, *args, **kw)
    process.join()
    said = Path(out).read_text()
    assert process.exitcode == 0, said[-3000:]
    return said


def wait_for(condition, seconds=240):
    "What the condition says at last."
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def run_installed(folder):
    "The command, of the package in `site`, in the folder `empty`."
    sys.path.insert(0, str(folder / "site"))
    for name in [name for name in sys.modules if name.partition(".")[0] == "grpo_nb"]:
        del sys.modules[name]
    os.chdir(folder / "empty")
    assert importlib.import_module("grpo_nb").__file__.startswith(sys.path[0])
    runpy.run_module("grpo_nb", run_name="__main__")
