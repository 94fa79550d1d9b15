"Scheduler, selectors and filter groups together: a run killed at any point continues as if nothing had happened."

import json

import numpy as np
import pytest
import torch
from resumed import state_differences, through_a_checkpoint

from grpo_nb.all import GroupCollector, Rollout, Task, TasksetScheduler, data_path
from grpo_nb.cli import main
from grpo_nb.filter_groups import FilterGroupsConfig
from grpo_nb.lab.record import Run as LoggedRun
from grpo_nb.selectors import SELECTORS, TaskSelectorConfig

SIZES = {"easy": 17, "middle": 40, "hard": 9}
STEPS, BATCH, SAMPLES = 40, 4, 4
STAGES = [
    {"samples": 60, "weights": {"easy": 2, "middle": 1}},
    {"weights": {"middle": 1, "hard": 2}},
]
# selectors of the three tasksets, share policy, what the collector does otherwise
RUNS = {
    "size": (("difficulty_based", "thompson", "greso"), "size", {"adaptive_cap": True}),
    "weights": (("shuffle", "learnability", "offline_easy2hard"), [2, 1, 1], {"surplus": "drop"}),
    "stages": (("random", "sequential", "thompson"), {"kind": "stages", "stages": STAGES}, {"on_cap": "skip_step"}),
}  # fmt: skip
OPTIONS = {
    "random": {"wrap": "epochs"},
    "difficulty_based": {"tau": 0, "do_sample": True, "target_reward": 0.5, "lamb": 0.1, "wrap": "epochs"},
    "thompson": {"lamb": 0.05, "pool": 2, "wrap": "epochs"},
    "learnability": {"lamb": 0.05, "wrap": "epochs"},
}  # fmt: skip
KEYS = {"difficulty_based": ["weak", "strong"], "offline_easy2hard": ["weak"]}


class Tasks:
    "Tasks of growing difficulty, with the pass rates of a weak and a strong simulated model."

    def __init__(self, size, shift):
        self.ease = np.linspace(2, -2, size) - shift
        skills = {"weak": -1, "strong": 3}
        self.columns = {k: 1 / (1 + np.exp(-(self.ease + s))) for k, s in skills.items()}

    def __len__(self):
        return len(self.ease)

    def __getitem__(self, i):
        return Task(f"task {i}", {"ease": float(self.ease[i])}, "", i)

    def column(self, name):
        return self.columns[name]


class Run:
    "A scheduler, a collector and a learner whose skill grows with every informative group."

    def __init__(self, label, state=None):
        selectors, shares, options = RUNS[label]
        data = {k: Tasks(n, 2 * i) for i, (k, n) in enumerate(SIZES.items())}
        chosen = [TaskSelectorConfig(s, 7, KEYS.get(s, []), OPTIONS.get(s, {})) for s in selectors]
        how = {"total_epochs": None, "seed": 3, "operators": ["pass_rate_calculator"]}
        self.scheduler = TasksetScheduler(data, BATCH, chosen, shares=shares, **how)
        options = {"surplus": "carry", "max_staleness": 1, "sizing": "adaptive"} | options
        options = {"max_num_gen_batches": 3, "on_cap": "train_partial"} | options
        config = FilterGroupsConfig(enable=True, metric="correct", log_format=None, **options)
        self.collector = GroupCollector(config, BATCH, SAMPLES)
        self.skill, self.rng, self.stream = -1.0, np.random.default_rng(5), []
        if state is not None:
            self.scheduler.load_state_dict(state["scheduler"])
            self.collector.load_state_dict(state["collector"])
            self.skill, self.rng.bit_generator.state = state["skill"], state["rng"]

    def save(self):
        "All of it, as a file holds it."
        state = {k: getattr(self, k).state_dict() for k in ("scheduler", "collector")}
        state |= {"skill": self.skill, "rng": self.rng.bit_generator.state}
        return through_a_checkpoint(state)

    def event(self):
        "One generation batch, or the end of a step: the points at which a run may be killed."
        if self.collector.status in ("full", "cap"):
            got = self.collector.take().rollout
            trained = [] if got is None else [got.tasks[i] for i in range(0, len(got), SAMPLES)]
            self.skill += 0.02 * len(trained)
            self.stream.append(("step", [(t.taskset_id, t.index) for t in trained]))
            return
        if self.collector.status == "closed":
            self.collector.begin()
        tasks = self.scheduler.read(self.collector.needed)
        self.stream.append(("read", [(t.taskset_id, t.index) for t in tasks]))
        rate_P = 1 / (1 + np.exp(-(np.array([t["ease"] for t in tasks]) + self.skill)))
        solved = self.rng.random((len(tasks), SAMPLES)) < rate_P[:, None]
        n = solved.size
        each, group_N = [t for t in tasks for _ in range(SAMPLES)], torch.arange(n) // SAMPLES
        bare = Rollout(group_N, each, {}, torch.ones(n, 1).bool(), torch.zeros(n, 1))
        rewards_NR = torch.tensor(solved.reshape(n, 1), dtype=torch.float32)
        rewarded = bare.replace(rewards_NR=rewards_NR, reward_names=("correct",))
        self.scheduler.observe(rewarded)
        self.collector.add(rewarded)

    @property
    def steps(self):
        return sum(kind == "step" for kind, _ in self.stream)


@pytest.mark.parametrize("label", RUNS)
def test_killed_at_every_point_and_resumed(label):
    whole, states = Run(label), []
    while whole.steps < STEPS:
        states.append(whole.save())
        whole.event()
    states.append(whole.save())
    # a new process after every event, each from the state that the one before left: as many resumes as there
    # are points to be killed at. All that decides the rest of the run is equal byte by byte after each
    state = states[0]
    for k, event in enumerate(whole.stream):
        run = Run(label, state)
        run.event()
        assert run.stream == [event], k
        state = run.save()
        assert not state_differences(state, states[k + 1]), k
    # and processes that go on to the end after one resume
    for k in (len(states) // 3, 3 * len(states) // 4):
        run = Run(label, states[k])
        while run.steps + sum(kind == "step" for kind, _ in whole.stream[:k]) < STEPS:
            run.event()
        assert run.stream == whole.stream[k:]
        assert not state_differences(run.save(), states[-1])
    # batches of different sizes, dropped groups and a kill inside a step did occur
    sizes = {len(tasks) for kind, tasks in whole.stream if kind == "read"}
    assert len(sizes) > 2 and whole.collector.gen_steps > 1.3 * STEPS


def test_every_selector_is_here():
    built_in = {k for k, c in SELECTORS.items() if c.__module__ == "grpo_nb.selectors"}
    assert {s for selectors, *_ in RUNS.values() for s in selectors} == built_in


OFTEN, NEVER = (f"{{format_match: {{pattern: '{x}'}}}}" for x in ("<think>.[0-5].*", "nonsense"))


@pytest.mark.parametrize(
    "size,code,left,paid", [(32, 1, 10, OFTEN), (4, 0, 2, OFTEN), (4, 1, 2, NEVER)]
)
def test_the_end_of_a_stream_and_nothing_trained_are_told(tmp_path, capsys, size, code, left, paid):
    rows = data_path("tasks/easy_train.jsonl").read_text().splitlines()[:10]
    (tmp_path / "ten.jsonl").write_text("\n".join(rows))
    options = [
        f"tasks.tasksets=[{{path: {tmp_path}/ten.jsonl, name: ten}}]", "tasks.epochs=1", "tasks.eval=data:tasks/easy_eval.jsonl",
        f"train_batch_size={size}", "num_generations=8", "eval.limit=2", "eval.samples=1",
        "policy.max_new_tokens=4", "run.progress=false", f"run.dir={tmp_path}/run", f"rewards.functions={paid}",
    ]  # fmt: skip
    assert main(["train", *options]) == code
    said = capsys.readouterr()
    assert ("Nothing was trained" in said.err) == ("held-out tasks" not in said.out) == code
    run = LoggedRun.open(tmp_path / "run")
    assert json.loads((run.dir / "status.json").read_text())["state"] != "finished" or not code
    ended = run.events().query("kind == 'ended'")
    assert ended["tasks_left"].tolist() == [left] and f"{left} left over" in ended["reason"].item()
