"""Settings of TRL, verl and Trinity-RFT runs as people published them, read as the expected readings say"""

import json
import math
from pathlib import Path

import pytest

from grpo_nb.integrations.coming_from import read_settings
from grpo_nb.integrations.from_trinity import config_from_trinity
from grpo_nb.integrations.from_trl import config_from_trl
from grpo_nb.integrations.from_verl import config_from_verl
from grpo_nb.lab.recipe import load_config, open_stream
from grpo_nb.losses import Clip
from grpo_nb.trainer import GRPO

FOLDER = Path(__file__).parent / "recorded" / "configs"
FILES = sorted(FOLDER.glob("*/*.json"))
CASES = {f"{p.parent.name}/{p.stem}": json.loads(p.read_text()) for p in FILES}
READERS = {"trl": config_from_trl, "verl": config_from_verl, "trinity": config_from_trinity}


def read(name):
    case = CASES[name]
    library = name.split("/")[0]
    options = {"processes": case["expected"]["processes"]} if library == "trl" else {}
    return READERS[library](case.get("settings") or case["overrides"], **options)


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]["expected"], read(request.param), CASES[request.param]


def test_the_batch_comes_out_right(case):
    want, got, _ = case
    c = got.config
    samples, passes = c.train_batch_size * c.num_generations, c.update.num_epochs
    per_update = c.update.minibatch_size or samples
    updates = math.ceil(samples / per_update) * passes
    found = {"prompts_per_rollout": c.train_batch_size, "samples_per_prompt": c.num_generations}
    found |= {"samples_per_rollout": samples, "samples_per_optimizer_step": per_update}
    found |= {"passes_over_rollout": passes, "optimizer_steps_per_rollout": updates}
    assert found.items() <= want.items()
    many = lambda n, word: f"{n:,} {word}{'s' * (n != 1)}"
    shape = f"{many(c.train_batch_size, 'prompt')} x {many(c.num_generations, 'sample')}"
    assert got.batch == f"{shape}, {many(updates, 'update')}"


def test_length_optimizer_sampling_advantage_and_seed_come_out_right(case):
    want, got, _ = case
    c, o, a, p = got.config, want["optimizer"], want["advantage"], got.config.policy
    total = want["total"]
    assert c.tasks.epochs == total["epochs"] and total.get("rollouts") in (None, 0, c.steps)
    assert c.optimizer.lr == o["learning_rate"] and c.update.max_grad_norm == o["max_grad_norm"]
    assert all(getattr(c.optimizer, k) == o[k] for k in ("schedule", "weight_decay"))
    if not isinstance(o["warmup"], str):  # else a share of a run of unknown length
        assert c.optimizer.warmup == o["warmup"]
    if "betas" in o:
        assert list(c.optimizer.betas) == o["betas"]
    assert {k: getattr(p, k) for k in want["sampling"]} == want["sampling"]
    assert all(getattr(c.advantage, k) == a[k] for k in ("mode", "eps", "ddof"))
    assert c.advantage.weights == a.get("reward_weights")
    assert p.lora == want["lora"]
    assert "seed" not in want or c.seed == want["seed"]


def test_the_loss_comes_out_right(case):
    want, got, _ = case
    w, c = want["loss"], got.config.update.loss
    same = "policy_loss aggregation entropy_coef kl_coef kl_importance".split()
    assert [getattr(c, k) for k in same] == [w[k] for k in same]
    clip = [w[k] for k in ("clip_low", "clip_high", "dual_clip")]
    assert [c.clip.low, c.clip.upper, c.clip.dual] == clip
    assert w["kl_kind"] in (None, c.kl_kind)
    assert c.ratio_max == w.get("ratio_max") and c.max_length == w.get("max_length")
    assert c.level == w.get("ratio_level", "token")


def test_filter_selectors_and_operators_come_out_right(case):
    want, got, _ = case
    f, c = want["filter_groups"], got.config
    if "nearest" not in f:
        for key, value in f.items():
            assert getattr(c.filter_groups, key) == value
    for entry, expected in zip(c.tasks.tasksets or (), want.get("selectors", ())):
        assert entry["name"] == expected["taskset"]
        selector = {k: v for k, v in expected.items() if k != "taskset"}
        assert {k: v for k, v in entry["selector"].items() if k in selector} == selector
    names = [o["name"] for o in c.tasks.operators or ()]
    assert names == want.get("operators", [])


def test_every_key_is_taken_or_told(case):
    want, got, whole = case
    given = whole.get("settings") or {o.lstrip("+").split("=")[0]: 0 for o in whole["overrides"]}
    assert set(got.taken) | set(got.left) >= {k for k in given if not isinstance(given[k], dict)}
    assert not set(got.taken) & set(got.left)
    assert set(want["taken"]) <= set(got.taken)
    assert {k for k in whole["not_taken"] if not isinstance(given.get(k), dict)} <= set(got.left)
    unknown = [k for k, why in got.left.items() if why.startswith("not a key")]
    assert set(unknown) <= set(want["unknown_keys"])


TINY = """policy.model=data:tiny-llama policy.dtype=float32 policy.system_prompt=null policy.max_new_tokens=10
tasks.tasksets=null tasks.train=data:tasks/easy_train.jsonl tasks.eval=null tasks.prompt=prompt train_batch_size=4
num_generations=4 filter_groups.gen_batch_size=4 advantage.weights=null rewards.functions.exact_answer.extract=marker
rewards.functions.exact_answer.marker=</think>""".split()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.filterwarnings("ignore")
def test_a_file_trains_a_step_of_the_embedded_model(name):
    case, library = CASES[name], name.split("/")[0]
    given = case.get("settings") or case["overrides"]
    processes = case["expected"].get("processes", 1)
    trainer = GRPO.from_config(read_settings(library, given, TINY, processes).config)
    assert math.isfinite(trainer.step()["loss"])


OTHERS = {name: c["expected"].get("other_process_counts", {}) for name, c in CASES.items()}


@pytest.mark.parametrize("name, processes", [(n, p) for n, said in OTHERS.items() for p in said])
def test_trl_with_other_numbers_of_processes(name, processes):
    settings, says, processes = CASES[name]["settings"], OTHERS[name][processes], int(processes)
    if says.startswith("refused"):
        with pytest.raises(ValueError, match="TRL refuses this"):
            config_from_trl(settings, processes)
        return
    prompts, updates = says.split(" prompt")[0], says.split(", ")[1].split(" ")[0]
    batch = config_from_trl(settings, processes).batch
    assert batch.startswith(f"{prompts} prompt") and f", {updates} update" in batch


def test_thirteen_settings_are_here_and_a_shell_script_and_a_yaml_file_are_read_alike(tmp_path):
    assert len(CASES) == 13
    overrides = CASES["verl/02_dapo_two_nodes"]["overrides"]
    script = tmp_path / "run.sh"
    lines = " \\\n    ".join(f"'{o}'" for o in overrides).replace("=16'", "='$n")
    script.write_text(f"set -x\nn=16\npython3 -m verl.trainer.main_ppo \\\n    {lines}\n")
    assert config_from_verl(script).config == config_from_verl(overrides).config
    actor = "{ppo_mini_batch_size: 64, optim: {lr: 1e-5}}"
    text = f"actor_rollout_ref: {{actor: {actor}, rollout: {{n: 4}}}}"
    (tmp_path / "run.yaml").write_text(text)
    got = config_from_verl(tmp_path / "run.yaml", ["data.train_batch_size=128"])
    assert got.batch == "128 prompts x 4 samples, 2 updates" and got.config.optimizer.lr == 1e-5


DOCUMENT = """
model: {model_path: "${oc.env:MODEL}"}
data_processor: {experience_pipeline: {operators: [{name: pass_rate_calculator}]}}
buffer:
  batch_size: 4
  total_epochs: 2
  explorer_input:
    tasksets:
      - name: my_taskset
        storage_type: file
        path: ${oc.env:TASKS,PATH}
        format: {prompt_key: prompt, system_prompt: Add.}
        rollout_args: {temperature: 0.6, top_p: 0.9}
        task_selector:
          selector_type: difficulty_based
          feature_keys: ["correct", "uncertainty"]
          kwargs: {m: 16, lamb: 0.2, rho: 0.2, target_reward: 0.9, tau: 0, do_sample: true}
"""


def test_tasksets_of_the_original_document_are_read_and_opened(tmp_path):
    path, recipe = tmp_path / "t.jsonl", tmp_path / "r.yaml"
    rows = [{"prompt": f"{i}+1=", "correct": 0.1, "uncertainty": 0.5} for i in range(10)]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    recipe.write_text(DOCUMENT.replace("PATH", str(path)))
    found = config_from_trinity(recipe)
    assert found.left["model.model_path"] == "$MODEL is not set there: give policy.model"
    config, p = found.config, found.config.policy
    assert (p.temperature, p.top_p, p.system_prompt) == (0.6, 0.9, "Add.")
    stream = open_stream(config)
    assert stream.max_steps == 5 and stream.selectors[0].options.target_reward == 0.9
    assert {t.taskset_id for t in stream.read()} == {"my_taskset"}
    for key, typed in {"prompt_key": "promt_key", "task_selector": "task_selectr"}.items():
        recipe.write_text(DOCUMENT.replace(key, typed))
        with pytest.raises(ValueError, match=f"Did you mean '{key}'"):
            config_from_trinity(recipe)
    again = DOCUMENT[DOCUMENT.index("      - name") :].replace("0.6", "1.0")
    recipe.write_text(DOCUMENT + again.replace("my_taskset", "other"))
    with pytest.raises(ValueError, match="policy.temperature 0.6 and 1.0: a run has one"):
        config_from_trinity(recipe)


MISTYPED = {
    ("trl", "max_steps"): ("ten", "must be a finite number"),
    ("trl", "gradient_accumulation_steps"): (0, "must be a whole number >= 1"),
    ("trl", "mask_truncated_completions"): ("no", "must be true or false"),
    ("trl", "top_k"): (2.5, "policy.top_k must be a whole number"),
    ("verl", "actor_rollout_ref.rollout.n"): ("many", "must be a whole number >= 1"),
    ("verl", "actor_rollout_ref.actor.loss_agg_mode"): (["token-mean"], "must be text"),
    ("trinity", "buffer.batch_size"): (2.5, "must be a whole number >= 1"),
    ("trinity", "seed"): ("one", "must be a whole number >= 0"),
}


@pytest.mark.parametrize(("library", "key"), MISTYPED)
def test_a_value_of_the_wrong_kind_is_one_line_that_names_key_and_value(library, key):
    value, says = MISTYPED[library, key]
    with pytest.raises(ValueError) as told:
        READERS[library]({key: value})
    assert all(part in str(told.value) for part in (f"{key}", says, f"got {value!r}"))


ACTOR = "actor_rollout_ref.actor"
VERL_LOSSES = {  # loss_mode -> what is read of it, with clip_ratio_high=0.28
    "vanilla": {"clip": Clip(0.2, 0.28, 3.0), "aggregation": "token_mean"},
    "gspo": {"clip": Clip(0.2, 0.28), "aggregation": "token_mean"},
    "geo_mean": {"clip": Clip(0.2, 0.28), "aggregation": "seq_mean_token_mean"},
    "cispo": {"options": {"ratio_min": 0.8, "ratio_max": 1.28}, "aggregation": "token_mean"},
    "dppo_tv": {"options": {"low": 0.2, "high": 0.28, "ratio_max": 3.0}},
    "sapo": {"options": {"tau_pos": 1.0, "tau_neg": 1.05}, "aggregation": "seq_mean_token_mean"},
    "gpg": {"options": {}, "clip": None, "aggregation": "token_mean"},
}


@pytest.mark.parametrize("mode", VERL_LOSSES)
def test_every_loss_of_verl_is_read_with_the_bounds_that_it_has(mode):
    keys = {f"{ACTOR}.policy_loss.loss_mode": mode, f"{ACTOR}.clip_ratio_high": 0.28}
    found = config_from_verl(keys).config.update.loss
    assert {k: getattr(found, k) for k in VERL_LOSSES[mode]} == VERL_LOSSES[mode]


@pytest.mark.parametrize(
    "keys, prompts, steps",
    [
        ({"gradient_accumulation_steps": 4, "steps_per_generation": 1}, 4, 10),  # the same weights
        ({"gradient_accumulation_steps": 4, "generation_batch_size": 16, "steps_per_generation": 2}, 4, 10),
        ({"gradient_accumulation_steps": 2, "steps_per_generation": 4}, 4, 5),
    ],
)  # fmt: skip
def test_generations_of_trl_that_share_weights_are_one(keys, prompts, steps):
    c = config_from_trl(keys | {"per_device_train_batch_size": 8, "max_steps": 10}).config
    assert (c.train_batch_size, c.steps) == (prompts, steps)
    with pytest.raises(ValueError, match="ends within a generation"):
        config_from_trl({"gradient_accumulation_steps": 4, "steps_per_generation": 6})


def test_files_of_verl_that_are_called_alike_are_several():
    files = ["gsm8k/test.parquet", "math/test.parquet"]
    c = config_from_verl({"data.val_files": files, "data.train_files": files}).config
    assert c.tasks.eval == dict(zip(("gsm8k-test", "math-test"), files))
    assert [t["name"] for t in c.tasks.tasksets] == ["gsm8k-test", "math-test"]


SCRIPT = r"""
# don't \
FILES="['$HOME/a.parquet','b.parquet']"
ROLLOUT="
    actor_rollout_ref.rollout.n=$((2 * (n + 2))) \
    actor_rollout_ref.rollout.seed=`date`"
DATA=(
  data.train_files="$FILES" data.val_files=$(pwd)/e.parquet  # of ${#DATA[@]}
  data.train_batch_size=${BATCH:-$((8 * 2))})
DATA+=(++data.max_response_length=${LONG:-700})
n=2; LONG=
ROLLOUT="
    actor_rollout_ref.rollout.n=$((2 * (n + 2))) \
    trainer.nnodes=$NODES"
python3 -m verl.trainer.main_ppo --config-name='gsm8k_multiturn_grpo' "${DATA[@]}" $ROLLOUT \
    actor_rollout_ref.model.path=${1}/m#2 +trainer.x='a b' $@ \
"""


def test_a_script_is_read_as_its_shell_does_and_what_it_does_not_set_is_asked_for(tmp_path):
    script = tmp_path / "run.sh"
    script.write_text(SCRIPT)
    more = ["actor_rollout_ref.actor.ppo_mini_batch_size=16"]
    with pytest.warns(UserWarning, match="gsm8k_multiturn_grpo sets"):
        found = config_from_verl(script, more)
    c, left = found.config, found.left
    assert (c.train_batch_size, c.num_generations, c.policy.max_new_tokens) == (16, 8, 700)
    assert [t["path"] for t in c.tasks.tasksets] == ["~/a.parquet", "b.parquet"]
    assert c.tasks.eval == "./e.parquet"
    assert left["actor_rollout_ref.model.path"] == "${1}/m#2 is not set there: give policy.model"
    assert left["trainer.nnodes"].startswith("cluster")
    for text in ("N=`nproc`", "for N in 1 2; do", "N=$((9 / 2))"):
        script.write_text(f"{text}\npython x data.train_batch_size=$N")
        with pytest.raises(
            ValueError, match=r"data.train_batch_size is .*, which is not set there"
        ):
            config_from_verl(script)
    script.write_text("python x data.y='1")
    with pytest.raises(ValueError, match="The script cannot be read as one of a shell: No closing"):
        config_from_verl(script)
    with pytest.raises(ValueError, match="'gae' needs a critic"):
        config_from_verl(["critic.model.path=x", *more])


_MODE = "policy_loss.loss_mode"


def test_a_program_and_a_notebook_of_trl_are_read_and_not_run(tmp_path):
    "Names that are set twice, and what is computed, are asked for."
    script, book = tmp_path / "train.py", tmp_path / "train.ipynb"
    script.write_text(
        "raise SystemExit\nmore = {}\nn, lr = 2, 1\nlr = 2\nk = 3 * 4\nK = k\nx = x\n"
        "def f():\n    return GRPOConfig('out', num_generations=K, beta=.5, learning_rate=lr, **more)"
    )
    cells = [
        "%%capture\n!pip install trl",
        "if True:\n    !ls\nc = trl.GRPOConfig(num_generations=8)",
    ]
    cells = [{"cell_type": "code", "source": [c]} for c in [*cells, "this is no Python"]]
    book.write_text(json.dumps({"cells": [{"cell_type": "markdown", "source": "#"}, *cells]}))
    parts = ["policy.model=data:tiny-llama", "tasks.train=data:tasks/easy_dev.jsonl"]
    parts += ["rewards.functions.exact_answer={}", "per_device_train_batch_size=24"]
    with pytest.raises(ValueError, match=r"learning_rate is \$\(lr\), which is not set there"):
        read_settings("trl", script, parts)
    reading = read_settings("trl", script, [*parts, "learning_rate=1e-5"])
    c = reading.config
    assert (c.num_generations, c.train_batch_size, c.optimizer.lr) == (12, 2, 1e-5)
    assert "**more" in reading.left
    with pytest.raises(ValueError, match="learning_rat: not a key .* did you mean 'learning_rate'"):
        read_settings("trl", book, [*parts[:3], "learning_rat=1"])
    assert read_settings("trl", book, parts[:3]).config.num_generations == 8
    book.write_text(json.dumps({"cells": cells[1:2] * 2}))
    with pytest.raises(ValueError, match="2 calls of GRPOConfig, and one is read"):
        read_settings("trl", book, parts)
    with pytest.raises(ValueError, match="train.py is a program: grpo-nb train --from trl"):
        load_config(script)


def test_a_misspelt_key_is_told_with_the_one_that_was_meant():
    assert config_from_trl({"learning_rat": 1}).left["learning_rat"].endswith("'learning_rate'?")
    left = config_from_trinity({"buffer.batch_sise": 4}).left
    assert left["buffer.batch_sise"].endswith("did you mean 'batch_size'?")
    assert [config_from_trl(x).config.seed for x in ({}, {"seed": 0})] == [42, 0]
    drawn = {"generation_kwargs": {"top_a": 1, "top_k": 5}, "top_k": 3}  # the first wins
    found = config_from_trl({"loss_type": "dr_grpo", "vllm_sampling_params": {"n": 1}} | drawn)
    assert found.config.policy.top_k == 5 and "no effect" not in str(found.left)
    with pytest.raises(ValueError, match="No key is known, 'training.beta' for one"):
        config_from_trl({"training": {"beta": 0.1}})
    assert found.table().loc["loss_type", "value"] == "ppo, dr_grpo"
    turns = config_from_verl(["actor_rollout_ref.rollout.multi_turn.enable=true"])
    loss = config_from_trl({"loss_type": "vespo", "vespo_k_neg": 1}).config.update.loss
    assert (loss.policy_loss, loss.options) == ("vespo", {"k_neg": 1})
    clip = ["actor_rollout_ref.actor.grad_clip=1", "actor_rollout_ref.actor.optim.clip_grad=0.5"]
    assert config_from_verl(clip).config.update.max_grad_norm == 0.5
    trinity = {"algorithm.advantage_fn_args.std_cal_level": "batch"}
    assert config_from_trinity(trinity).config.advantage.mode == "grpo_batch"
    trl = {"vllm_importance_sampling_mode": "token_mask", "vllm_importance_sampling_clip_max": 2}
    at = "algorithm.rollout_correction.rollout_is"
    verl = {at: "token", f"{at}_threshold": 2.0}
    both = {"token_mask": config_from_trl(trl), "token_truncate": config_from_verl(verl)}
    for want, read in both.items():
        update = read.config.update
        assert (update.sampling_correction, update.sampling_cap) == (want, 2.0)
    whole = config_from_verl({"algorithm.adv_estimator": "reinforce_plus_plus_baseline"}).config
    assert whole.advantage.options == {"level": "token"}  # as it is whitened there
    peft = config_from_trl({"use_peft": True}).config.policy.lora
    assert peft == {"r": 16, "lora_alpha": 32, "target_modules": None}
    with pytest.raises(ValueError, match="a value as in YAML; got 'data.x={a: b'"):
        config_from_verl(["data.x={a: b"])
    assert all("this changes" in [*x.left.values()][0] for x in (found, turns))
    forks = [
        "trainer.rejection_sample",
        "actor_rollout_ref.rollout.n_agent",
        "data.filter_accuracy",
    ]
    forks += ["actor_rollout_ref.actor.loss_remove_clip"]
    told = config_from_verl(dict.fromkeys(forks, 1) | {"algorithm.adv_estimator": "grpo"})
    assert all(why.startswith("not a key that") for why in told.left.values())
    floor = {
        f"actor_rollout_ref.actor.{k}": v for k, v in (("clip_ratio_low", 10), (_MODE, "cispo"))
    }
    assert config_from_verl(floor).config.update.loss.options["ratio_min"] == 0.0


def test_truncation_length_penalty_and_the_floor_are_read():
    trl = read("trl/03_open_r1_codeforces").config
    assert trl.update.mask_truncated and trl.update.loss.count_empty
    dapo = read("verl/02_dapo_two_nodes").config
    want = {"max_length": 20480, "buffer": 4096, "factor": 1.0}
    assert dapo.rewards.functions == {"soft_overlong": want}
    how = {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}}
    o = config_from_trl(how).config.optimizer
    assert (o.schedule, o.min_lr_ratio) == ("cosine", 0.1)
    schedule = ["actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"]
    floor = "actor_rollout_ref.actor.optim.min_lr_ratio=0.1"
    assert config_from_verl([*schedule, floor]).config.optimizer.min_lr_ratio == 0.1
