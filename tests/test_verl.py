"""Our components inside verl, against calls recorded from the real one; `make verl` runs the whole of it"""

import json
import sys
import types
from pathlib import Path

import forked
import numpy as np
import pandas as pd
import pytest
import torch
from test_rewards import batch

from grpo_nb.all import GRPO, RewardRunner, Task, TokenPolicy, data_path, exact_answer
from grpo_nb.integrations import verl as inside
from grpo_nb.scheduler import TasksetScheduler

CALLS = json.loads((Path(__file__).parent / "recorded" / "verl_calls.json").read_text())


class Actor:  # verl's settings of the recorded calls
    clip_ratio, clip_ratio_low, clip_ratio_high, clip_ratio_c = 0.2, 0.1, 0.28, 3.0
    global_batch_info: dict = {}

    class policy_loss:
        dro_beta = 0.5


@pytest.mark.parametrize("mode", CALLS["advantages"])
def test_advantages_of_recorded_batches(mode):
    columns = {k: np.array(v, object) for k, v in CALLS["columns"].items()}
    data = types.SimpleNamespace(non_tensor_batch=columns)  # found where verl's function has it
    assert data.non_tensor_batch
    rewards, mask = map(torch.tensor, CALLS["advantage_inputs"])
    how = {"gdpo_reward_keys": ["acc", "fmt"], "gdpo_reward_weights": [1.0, 0.5]}
    got, _ = inside._make_estimator(mode)(rewards, mask, columns["uid"], how)
    want = torch.tensor(CALLS["advantages"][mode])
    torch.testing.assert_close(got, want, atol=1e-6, rtol=0)
    assert np.isnan(columns["fmt"].astype(float)).any()


@pytest.mark.parametrize("name", CALLS["losses"])
def test_losses_of_recorded_calls_are_verl_s_own(name, monkeypatch):
    core = types.ModuleType("verl.trainer.ppo.core_algos")
    core.agg_loss = lambda loss, mask, mode, **_: (loss * mask).sum() / mask.sum()  # token-mean
    for part in ("verl", "verl.trainer", "verl.trainer.ppo"):
        monkeypatch.setitem(sys.modules, part, types.ModuleType(part))
    monkeypatch.setitem(sys.modules, core.__name__, core)
    old, logp, advantages, mask = map(torch.tensor, CALLS["loss_inputs"])
    got, metrics = inside._make_loss(name)(old, logp, advantages, mask, "token-mean", Actor)
    assert got.item() == pytest.approx(CALLS["losses"][name], abs=1e-6)
    assert set(metrics) == {"actor/pg_clipfrac", "actor/pg_clipfrac_lower", "actor/ppo_kl"}


def test_without_verl_nothing_is_imported_and_nothing_breaks(tmp_path):
    code = "import sys, grpo_nb.integrations.verl as v; print(v.register(), 'ray' in sys.modules)"
    asked = {"VERL_USE_EXTERNAL_MODULES": "grpo_nb.integrations.verl"}
    assert forked.run(tmp_path / "out", exec, code, env=asked).strip() == "[] False"


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    "As verl's users write it."
    assert data_source == "sums" and extra_info["split"] == "train" and extra_info["num_turns"] == 2
    right = solution_str.split("</think>")[-1].replace("<eos>", "").strip() == ground_truth
    return {"score": float(right), "acc": right}


def test_its_parquet_and_its_compute_score_train_here_unchanged(tmp_path):
    rows = [json.loads(x) for x in open(data_path("tasks/middle_train.jsonl"))][:12]
    table = {
        "data_source": "sums",
        "prompt": [[{"role": "user", "content": r["prompt"]}] for r in rows],
        "ability": "math",
        "reward_model": [{"style": "rule", "ground_truth": r["answer"]} for r in rows],
        "extra_info": [{"split": "train", "index": i} for i in range(12)],
    }
    pd.DataFrame(table).to_parquet(tmp_path / "train.parquet")
    policy = TokenPolicy.from_pretrained(data_path("tiny-llama"), max_new_tokens=10)
    policy.tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    reward = inside.as_reward(compute_score, ["acc"])
    sizes = {"train_batch_size": 6, "num_generations": 4}
    trainer = GRPO(policy, str(tmp_path / "train.parquet"), reward, sizes)
    rollout = trainer.collect()
    assert rollout.reward_names == ("compute_score/score", "compute_score/acc")
    own = exact_answer(extract="marker", marker="</think>")
    answers = {r["prompt"]: r["answer"] for r in rows}
    for task, text, score in zip(rollout.tasks, rollout.outputs, rollout.rewards[:, 0].tolist()):
        assert own(completion=text, answer=answers[task.prompt[0]["content"]]) == score
    assert trainer.step(rollout)["upd/n_done"] == 1


def test_an_async_compute_score_and_a_missing_answer():
    async def judge(data_source, solution_str, ground_truth, extra_info):
        return 1.0 if solution_str == ground_truth else None

    with RewardRunner([inside.as_reward(judge, ["acc"])]) as runner:  # verl's name for a bare score
        tasks = [Task("p", {"reward_model": {"ground_truth": "x"}})] * 2
        scored = runner(batch(["x", "y"], tasks))
        assert (scored.rewards_NR[0] == 1).all() and scored.rewards_NR[1].isnan().all()
        with pytest.raises(ValueError, match="needs 'reward_model.ground_truth'"):
            runner(batch(["x"], [Task("p", {"answer": "x"})]))


def test_an_operator_of_trinity_is_refused_with_the_difference():
    class Shaper:
        def process(self, exps):
            return exps, {}

    with pytest.raises(ValueError, match="what is trained on stays as it is"):
        TasksetScheduler([[{"prompt": "p"}]], 1, operators=[Shaper()])
