"A study carried out by somebody else's workers: the same numbers, and a lost worker is no failed run."

import json
import os
import signal
from concurrent.futures import Future

import cloudpickle
import forked
import pytest
from resumed import is_timing
from test_compare import BASE

from grpo_nb.lab.compare import compare
from grpo_nb.lab.study import Samples

RATES = {"slow": 1e-5, "fast": 1e-3}


def study(folder, variants=("slow", "fast"), **kwargs):
    variants = {name: {"optimizer.lr": RATES[name]} for name in variants}
    return compare(variants, BASE, seeds=[1], budget=Samples(24), dir=folder, **kwargs)


def numbers(study):
    untimed = lambda curve: {k: v for k, v in curve.items() if not is_timing(k)}
    curves = [untimed(run["curve"]) for run in study.runs]
    return [json.dumps(curve, sort_keys=True) for curve in curves]  # NaN is NaN


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    return numbers(study(tmp_path_factory.mktemp("here")))


@pytest.fixture
def client():
    distributed, dask = pytest.importorskip("distributed"), pytest.importorskip("dask")
    how = {"threads_per_worker": 1, "dashboard_address": None, "silence_logs": 50}
    with dask.config.set({"distributed.worker.multiprocessing-method": "forkserver"}):
        distributed.utils.get_mp_context()
        forked.FORKS.set_forkserver_preload(forked.LOADED.split())  # it had others loaded
        with distributed.LocalCluster(1, **how) as cluster, distributed.Client(cluster) as client:
            yield client


class Deadly:
    "An executor whose first worker dies with its job, before it has loaded anything for it."

    def __init__(self, client, flag):
        self.client, self.flag = client, flag

    def submit(self, function, job):
        def die_once(flag, work):
            if not os.path.exists(flag):
                open(flag, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            function, job = cloudpickle.loads(work)
            return function(job)

        return self.client.submit(die_once, str(self.flag), cloudpickle.dumps((function, job)))


def test_workers_of_dask_give_the_numbers_of_this_process_also_when_one_is_killed(
    client, here, tmp_path
):
    before = set(client.run(os.getpid).values())
    there = study(tmp_path / "study", ["slow"], executor=Deadly(client, tmp_path / "died"))
    assert [r["status"] for r in there.runs] == ["done"] and numbers(there) == here[:1]
    assert set(client.run(os.getpid).values()) != before
    assert numbers(study(tmp_path / "own", ["fast"], executor=client)) == here[1:]


def test_jobs_of_submitit_give_the_numbers_of_this_process(here, tmp_path):
    submitit = pytest.importorskip("submitit")
    executor = submitit.AutoExecutor(folder=tmp_path / "logs", cluster="local")
    executor.update_parameters(timeout_min=5)
    assert numbers(study(tmp_path / "study", ["fast"], executor=executor)) == here[1:]


class Lossy:
    "An executor that loses the first `losses` jobs it is given."

    def __init__(self, losses):
        self.losses, self.submitted = losses, 0

    def submit(self, function, job):
        self.submitted, future = self.submitted + 1, Future()
        if self.submitted <= self.losses:
            future.set_exception(ConnectionError("the node is gone"))
        else:
            future.set_result(function(job))
        return future


def test_a_lost_run_is_tried_three_times(here, tmp_path):
    executor = Lossy(2)
    assert numbers(study(tmp_path / "a", ["slow"], executor=executor)) == here[:1]
    assert executor.submitted == 3
    with pytest.raises(ConnectionError, match="the node is gone"):
        study(tmp_path / "b", executor=Lossy(99))
