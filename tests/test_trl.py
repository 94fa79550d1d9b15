"""Our components inside TRL, against calls recorded from the real one; `make trl` runs the whole of it"""

import json
from pathlib import Path

import torch

from grpo_nb.advantages import AdvantageConfig, compute_advantages
from grpo_nb.integrations import trl as inside
from grpo_nb.update import KLStop

RUNS = json.loads((Path(__file__).parent / "recorded" / "trl_runs.json").read_text())


def test_advantages_of_a_recorded_call_are_trl_s():
    call = RUNS["call"]
    rewards = torch.tensor(call["rewards"])
    assert rewards.isnan().any()  # a reward was None
    config = AdvantageConfig(mode="grpo", weights=[1.0, 1.0])
    got = compute_advantages(rewards, torch.arange(len(rewards)) // 8, ["right", "short"], config)
    torch.testing.assert_close(got.values, torch.tensor(call["advantages"]), atol=1e-6, rtol=0)


def test_a_stopped_rollout_and_a_curriculum_are_recorded():
    stop, drawn = RUNS["kl_stop"], RUNS["runs"]["curriculum"]
    assert stop["stopped"] == [0, 1, None, None] * 3 and stop["difference"] < 1e-4
    row = {"kl_old/k3": stop["kl"][1]}  # what our own rule says of the recorded distances
    assert KLStop(target=stop["kl"][1]).exceeded(row, 1) == ""
    assert KLStop(target=stop["kl"][1] / 2).exceeded(row, 1)
    assert len(drawn["loss"]) == 6 and drawn["right"] != RUNS["runs"]["TRL"]["right"][:6]


def test_tasks_of_several_sets_are_drawn_without_end_and_go_on():
    data = {"easy": [{"prompt": str(i)} for i in range(3)], "hard": [{"prompt": "x"}] * 5}
    streams = [inside._task_stream(data, "thompson", seed=1) for _ in range(2)]
    first = [streams[0].read(4) for _ in range(5)]
    assert [streams[1].read(4) for _ in range(5)] == first  # alike on every process
    state, streams[1] = streams[0].state_dict(), inside._task_stream(data, "thompson", seed=1)
    streams[1].load_state_dict(state)
    assert streams[1].read(4) == streams[0].read(4)
