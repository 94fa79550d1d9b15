"""Recordings that should keep a beat: BasicMotions of the aeon wheel as tasks, a policy that imitates them, a reward.

pip install --no-deps aeon==1.6.0        carries the recordings, which are read where it is installed
python .ci/save_outputs.py nbs/tutorials/motion_diffusion.ipynb       trains the study that motion_beat.json keeps
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from grpo_nb.applications.motion import MotionMLP, _new_model, pretrain
from grpo_nb.core import seeded
from grpo_nb.policies.diffusion import DiffusionPolicy
from grpo_nb.policies.samplers import ddpm_sampler
from grpo_nb.tasks import Task


def _find_basic_motions() -> Path:
    "The folder of BasicMotions in the installed aeon, which is not imported."
    spec = importlib.util.find_spec("aeon")
    folder = Path(spec.origin).parent / "datasets/data/BasicMotions" if spec else None
    if folder is None or not folder.is_dir():
        raise ValueError(
            "BasicMotions comes with the wheel of aeon: pip install --no-deps aeon==1.6.0"
        )
    return folder


def _read_ts(path: Path) -> tuple[Tensor, list[str]]:
    "Equally long series (n, F, C) and class labels of a .ts file."
    lines = [v.strip() for v in path.read_text(encoding="utf-8").splitlines()]
    data = lines[[v.lower() for v in lines].index("@data") + 1 :]
    rows = [v.split(":") for v in data if v and not v.startswith("#")]
    series = [[[float(x) for x in channel.split(",")] for channel in row[:-1]] for row in rows]
    return torch.tensor(series).transpose(1, 2).contiguous(), [row[-1] for row in rows]


@dataclass(frozen=True)
class Recordings:
    "Recordings of several activities at 10 Hz, in units of the network."

    values: Tensor  # (n, F, C): asinh of the raw values, over the deviation of each channel
    kind: Tensor  # (n,) int64: which activity
    names: tuple[str, ...]  # of the activities

    def draw(
        self,
        n: int,  # clips
        generator: torch.Generator,
    ) -> tuple[Tensor, Tensor, Tensor]:  # clips (n, F, C), activity one-hot (n, A), mask (n, F)
        "Random pieces of random recordings, every activity equally often; after 24 to 40 frames the rest is padding."
        frames = 40
        share = 1.0 / torch.bincount(self.kind, minlength=len(self.names))[self.kind]
        which = torch.multinomial(share, n, replacement=True, generator=generator)
        start = torch.randint(self.values.shape[1] - frames + 1, (n,), generator=generator)
        length = torch.randint(24, frames + 1, (n,), generator=generator)
        mask = torch.arange(frames) < length[:, None]
        clip = self.values[which[:, None], start[:, None] + torch.arange(frames)]
        one_hot = torch.nn.functional.one_hot(self.kind[which], len(self.names)).float()
        return torch.where(mask[:, :, None], clip, 0.0), one_hot, mask


ACTIVITIES = ("Walking", "Running", "Badminton")


def load_basic_motions() -> dict[str, Recordings]:  # "train" and "test", 10 of each activity
    "BasicMotions, compressed by asinh so that a run is not a hundred times larger than a step."
    folder, unit, out = _find_basic_motions(), None, {}
    for part in ("train", "test"):
        values, labels = _read_ts(folder / f"BasicMotions_{part.upper()}.ts")
        keep = [i for i, v in enumerate(labels) if v in ACTIVITIES]
        kind = torch.tensor([ACTIVITIES.index(labels[i]) for i in keep])
        values = values[keep].asinh()
        unit = values.flatten(0, 1).std(0) if unit is None else unit
        out[part] = Recordings(values / unit, kind, ACTIVITIES)
    return out


def _generated_recordings() -> Recordings:
    "Stand-in recordings: an oscillation of random phase and amplitude in every channel, with noise."
    g, tempos = seeded(0, "recordings"), torch.tensor([1.4, 1.1, 0.6])  # per second
    kind = torch.arange(3).repeat_interleave(10)
    tempo = tempos[kind] * (1 + 0.1 * torch.randn(30, generator=g))
    phase = 2 * torch.pi * torch.rand(30, 1, 6, generator=g)
    size = 1 + 0.3 * torch.randn(30, 1, 6, generator=g)
    time = torch.arange(100)[:, None] / 10
    wave = size * torch.sin(2 * torch.pi * tempo[:, None, None] * time + phase)
    values = wave + 0.5 * torch.randn(wave.shape, generator=g)
    return Recordings(values, kind, tuple(f"tempo {t:.1f}" for t in tempos))


def _beat_share(
    clip: Tensor,  # (N, F, C) motions at 10 Hz
    mask: Tensor,  # (N, F) bool: frames that count
) -> Tensor:  # (N,) in [0, 1]
    "Share of the acceleration's variance that a sine and a cosine of 1 Hz explain together (least squares)."
    keep = mask[:, :, None].double()
    angle = 2 * torch.pi / 10 * torch.arange(clip.shape[1], device=clip.device)
    wave = torch.stack([angle.cos(), angle.sin()], 1).double().expand(len(clip), -1, -1)
    centre = lambda v: (v - (v * keep).sum(1, keepdim=True) / keep.sum(1, keepdim=True)) * keep
    wave, x = centre(wave), centre(clip[:, :, :3].double())
    product = wave.transpose(1, 2) @ x
    explained = (product * torch.linalg.solve(wave.transpose(1, 2) @ wave, product)).sum((1, 2))
    return explained / x.square().sum((1, 2)).clamp(min=1e-9)


def beat(completions: Sequence[Tensor], **columns) -> list[float]:
    "`_beat_share` as a reward function of the runner; completions are (frames, 6)."
    length = torch.tensor([len(c) for c in completions])
    clip = nn.utils.rnn.pad_sequence([c.float() for c in completions], batch_first=True)
    return _beat_share(clip, torch.arange(clip.shape[1]) < length[:, None]).tolist()


def beat_tasks(
    n: int,  # tasks
    recordings: Recordings,
    generator: torch.Generator,
) -> list[Task]:
    "Tasks with an activity and a length of 24 to 40 frames each."
    a = len(recordings.names)
    kind = torch.randint(a, (n,), generator=generator).tolist()
    length = torch.randint(24, 41, (n,), generator=generator).tolist()
    columns = [
        {"activity": [float(k == j) for j in range(a)], "frames": m} for k, m in zip(kind, length)
    ]
    names = [f"{recordings.names[k]}, {m / 10:.1f} s" for k, m in zip(kind, length)]
    return [Task(name, c, "beat", i) for i, (name, c) in enumerate(zip(names, columns))]


def beat_policy(
    recordings: Recordings,
    seed: int = 0,  # of weights and clips
    steps: int = 1000,  # of pretraining
    **options,  # of DiffusionPolicy
) -> DiffusionPolicy:
    "A policy that imitates clips of the recordings of up to 40 frames, by DDPM with 10 steps that predicts the clean clip."
    sampler, shape = ddpm_sampler(10), (40, recordings.values.shape[2])
    model = _new_model(MotionMLP, seed, shape=shape, condition=len(recordings.names))
    pretrain(model, sampler, recordings.draw, seeded(seed, "clips"), steps, batch=128)
    return DiffusionPolicy(model, sampler, shape, "activity", lengths="frames", **options)
