"""Which room stands on which floor, and which room imports which: read from the notebooks' places and the modules' code.

python .ci/floors.py          lists the rooms, and every arrow that does not go down
"""

import ast
import functools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WINGS = (
    "ground",
    "method",
    "lab",
    "outside",
)  # from the bottom up; the method never imports the lab


@functools.cache
def rooms() -> dict[str, tuple[str, int]]:
    "Module name -> wing and floor; the floor is the number in the notebook's name."
    out = {}
    for path in sorted((ROOT / "nbs").rglob("*.ipynb")):
        module = re.search(r"#\| *default_exp ([\w.]+)", path.read_text(encoding="utf-8"))
        if not module or any(p.startswith((".", "_")) for p in path.parts[len(ROOT.parts) :]):
            continue
        folder = path.relative_to(ROOT / "nbs").parts[0]
        number = re.match(r"\d+", path.name)
        floor = int(number[0]) if number else 5
        out[module[1]] = (folder if folder in WINGS else "outside", floor)
    return out


def imports(module: str) -> set[str]:
    "The rooms that a module imports, also inside functions."
    path = ROOT / "grpo_nb" / (module.replace(".", "/") + ".py")
    package = ["grpo_nb", *module.split(".")[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            name = ".".join([*base, node.module] if node.module else base)
            found |= {name, *(f"{name}.{a.name}" for a in node.names)}
        elif isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
    return {n.removeprefix("grpo_nb.") for n in found if n.startswith("grpo_nb.")} & set(rooms())


def arrows() -> list[tuple[str, str]]:
    "Every import between two rooms, as (who, whom)."
    return [(a, b) for a in rooms() for b in sorted(imports(a)) if a != b]


def wrong_arrows() -> list[tuple[str, str]]:
    "Imports that do not go down."
    place = {m: (WINGS.index(w), floor) for m, (w, floor) in rooms().items()}
    return [(a, b) for a, b in arrows() if not place[b] < place[a]]


if __name__ == "__main__":
    for module, (wing, floor) in sorted(
        rooms().items(), key=lambda x: (WINGS.index(x[1][0]), x[1][1])
    ):
        print(f"{wing:8} {floor}  {module}")
    bad = [f"{a} -> {b}" for a, b in wrong_arrows()]
    print("Arrows that do not go down:", ", ".join(bad) or "none")
    sys.exit(bool(bad))
