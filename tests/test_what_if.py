"""Stored samples under other estimators and filters: tables of TRL and verl as recorded from the real programs"""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from grpo_nb.lab.record import Run
from grpo_nb.lab.what_if import _read_samples, what_if

RECORDED = Path(__file__).parent / "recorded"


def test_trl_advantages_are_found_again_and_a_rollout_that_it_trains_twice_counts_once():
    seen = what_if(RECORDED / "trl", ["grpo"])
    assert seen.components == ["right", "short"] and seen.samples["short"].isna().any()
    np.testing.assert_allclose(seen.samples["grpo"], seen.samples["stored"], atol=1e-6)
    frame = _read_samples(RECORDED / "trl")
    assert frame["step"].unique().tolist() == [1, 3, 5, 6]  # 6 holds the samples of an evaluation
    assert frame.groupby("group").size().tolist() == [8] * 16


def test_groups_of_verl_are_neighbours_with_equal_prompts():
    frame = _read_samples(RECORDED / "verl")
    assert frame.attrs["components"] == ["acc", "length"]
    assert set(frame.groupby("group").size()) == {4}
    assert (frame.groupby("group")["prompt"].nunique() == 1).all()
    ids = [f"a{k % 2}_{k}_0" for k in range(len(frame))]  # of newer dumps
    newer = _read_samples(frame.drop(columns="group").assign(step=1, uid=ids))
    assert (newer["group"] == np.arange(len(frame)) % 2).all()


def test_components_that_a_table_lacks_and_rewards_that_are_all_none(tmp_path):
    one = {"step": 1, "prompt": ["p"] * 4, "completion": "", "right": [1.0, 0, 0, 1], "len": 7}
    two = one | {"step": 2, "prompt": ["q"] * 4, "right": [1.0, 1, 1, 1]}
    (folder := tmp_path / "completions").mkdir()
    for k, table in enumerate((one | {"short": [None] * 4}, two)):
        pd.DataFrame(table).to_parquet(folder / f"completions_{k}.parquet")
    log = {"step": 1, "rewards/right/mean": 0.5, "rewards/short/mean": None}  # names no `len`
    (tmp_path / "trainer_state.json").write_text(json.dumps({"log_history": [log]}))
    seen = what_if(folder, ["grpo", "gdpo"], "right")
    assert seen.components == ["right", "short"]
    assert seen.groups()["state"].tolist() == ["varied", "all right"]
    assert np.isfinite(seen.samples[["grpo", "gdpo"]]).all(axis=None)


def test_a_run_is_seen_with_its_own_weights_options_and_lengths(tmp_path):
    def logged(folder, columns, **config):
        each = {"group": [0] * 4, "prompt": ["p"] * 4, "completion": [""] * 4}
        with Run.create(folder, config) as run:
            run.log_samples(1, each | columns)
        return run

    rewards = {"rewards/a": [1.0, 0, 0, 1], "rewards/size": [0.0, 6, 2, 1], "advantage": [0.0] * 4}
    run = logged(tmp_path / "a", rewards, advantage={"weights": {"a": 2.0, "size": 0.0}})
    for source in (run, tmp_path / "a"):
        seen = what_if(source, ["grpo"]).samples
        np.testing.assert_allclose(seen["grpo"], [0.866, -0.866, -0.866, 0.866], atol=1e-3)
        assert seen["reward"].tolist() == [2, 0, 0, 2]
    rewards = {"rewards/a": [1.0, 0, 0, 0.5], "length": [1, 2, 3, 4], "advantage": [0.5, 0, 0, 0]}
    own = {"mode": "passk", "options": {"scale": "none"}}
    run = logged(tmp_path / "b", rewards, advantage=own, rewards={"kl_in_reward": 0.1})
    with pytest.warns(UserWarning, match="only stored advantages are with it"):
        seen = what_if(run, ["passk", "opo"]).samples
    assert seen["passk"].tolist() == seen["stored"].tolist()
    np.testing.assert_allclose(seen["opo"], [0.7, -0.3, -0.3, 0.2], atol=1e-6)
