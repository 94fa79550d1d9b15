"""Write README.md from nbs/index.ipynb: its markdown, its shown code and its outputs.

python .ci/build_readme.py [--check]
"""

import argparse
import base64
import re
import sys
from pathlib import Path

import nbformat

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "nbs" / "images" / "readme.png"  # the index shows one


def readme() -> str:
    nb = nbformat.read(ROOT / "nbs" / "index.ipynb", as_version=4)
    out = []
    for cell in nb.cells:
        source = cell.source.strip()
        if not source or re.search(r"^#\|\s*(hide|default_exp)\b", source, re.M):
            continue
        if cell.cell_type == "markdown":
            if source.startswith("---"):
                continue
            # links of the docs start in nbs/, those of the README above it
            out.append(re.sub(r"\]\((?!https?:|#)([\w./-]+\.(ipynb|png))\)", r"](nbs/\1)", source))
        elif cell.cell_type == "code":
            code = "\n".join(x for x in source.splitlines() if not x.startswith("#|"))
            out.append(f"```python\n{code.strip()}\n```")
            for o in cell.get("outputs", []):
                text = o.get("text") or o.get("data", {}).get("text/plain")
                if png := o.get("data", {}).get("image/png"):
                    PICTURE.parent.mkdir(exist_ok=True)
                    PICTURE.write_bytes(base64.b64decode(png))
                    out.append(f"![What the cell shows]({PICTURE.relative_to(ROOT)})")
                elif text:
                    text = text if isinstance(text, str) else "".join(text)
                    out.append("\n".join("    " + x for x in text.rstrip().splitlines()))
    return "\n\n".join(out) + "\n"


def main():
    ap = argparse.ArgumentParser(description=__doc__)
    ap.add_argument("--check", action="store_true", help="only say whether README.md is stale")
    path = ROOT / "README.md"
    text = readme()
    if ap.parse_args().check:
        if path.read_text(encoding="utf-8") != text:
            sys.exit("README.md is stale: run `python .ci/build_readme.py`.")
        return
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
