"""Build the docs site in _docs/ without Quarto: nbdev processes the notebooks, smalldocs renders them.

The site works from disk and offline: maths (KaTeX) is vendored, links are relative, `source` links point to copies of
the modules. A reader with Quarto can run `nbdev_docs` on the same sources instead.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "_docs"


def page_name(notebook: Path) -> str:
    "nbdev's output name: 00_core.ipynb -> core.html, 04_policies.tokens.ipynb -> policies.tokens.html."
    return re.sub(r"^\d+_", "", notebook.stem) + ".html"


def main():
    from nbdev.config import get_config
    from nbdev.quarto import refresh_quarto_yml
    from nbdev.serve import proc_nbs

    os.chdir(ROOT)
    cfg = get_config()
    refresh_quarto_yml()
    proc = Path(proc_nbs("nbs", n_workers=2))
    sidebar = (proc / "sidebar.yml").read_text(encoding="utf-8")
    for nb in sorted(proc.rglob("*.ipynb")):
        new = nb.with_name(page_name(nb).replace(".html", ".ipynb"))
        if new != nb:
            nb.rename(new)
            sidebar = sidebar.replace(str(nb.relative_to(proc)), str(new.relative_to(proc)))
    (proc / "sidebar.yml").write_text(sidebar, encoding="utf-8")
    for nb in proc.rglob("*.ipynb"):  # links in markdown name notebooks by their files
        text = nb.read_text(encoding="utf-8")
        text = re.sub(r"\]\(((?:[\w.]+/)*)\d+_([\w.]+\.ipynb)", r"](\1\2", text)
        nb.write_text(text, encoding="utf-8")
    shutil.rmtree(SITE, ignore_errors=True)
    subprocess.run(["smalldocs", "render", str(proc)], check=True)
    made = next(
        p for p in (ROOT / "_docs", proc / "_docs", proc / "_site", ROOT / "_site") if p.is_dir()
    )
    if made != SITE:
        shutil.move(made, SITE)
    shutil.copytree(ROOT / ".ci" / "katex", SITE / "katex")
    source = SITE / "source"
    for f in (ROOT / "grpo_nb").rglob("*.py"):
        to = source / f.relative_to(ROOT / "grpo_nb").with_suffix(".py.txt")
        to.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(f, to)
    home = f"{cfg.doc_host}{cfg.doc_baseurl}".rstrip("/")
    blob = f"{cfg.git_url}/blob/{cfg.branch}/"
    pages = list(SITE.rglob("*.html"))
    for page in pages:
        up = "../" * len(page.relative_to(SITE).parent.parts)
        text = page.read_text(encoding="utf-8")
        text = re.sub(
            r"https://cdn\.jsdelivr\.net/npm/katex@[\d.]+/dist/contrib", f"{up}katex", text
        )
        text = re.sub(r"https://cdn\.jsdelivr\.net/npm/katex@[\d.]+/dist", f"{up}katex", text)
        text = re.sub(
            re.escape(blob) + r"(?:grpo_nb/)?([\w/]+)\.py(#L\d+)?", rf"{up}source/\1.py.txt", text
        )
        text = text.replace(home + "/", up or "./")
        text = re.sub(r'(<(?:script|link)[^>]*?)\s+integrity="[^"]*"', r"\1", text)
        page.write_text(text, encoding="utf-8")
    problems = check_links(pages)
    shutil.rmtree(proc, ignore_errors=True)
    print(f"{len(pages)} pages in {SITE.relative_to(ROOT)}/index.html")
    if problems:
        sys.exit("Broken links:\n" + "\n".join(problems))


def check_links(pages) -> list[str]:
    "Local links and images that lead nowhere, and scripts that would need the network."
    bad = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for kind, url in re.findall(r'<(script|link|img|a)\b[^>]*?(?:href|src)="([^"]+)"', text):
            if re.match(r"(https?:)?//", url):
                if kind in ("script", "img"):
                    bad.append(f"{page.name}: {kind} from the network: {url}")
                continue
            path = url.split("#")[0].split("?")[0]
            if not path or re.match(r"(data|mailto|javascript):", url):
                continue
            if not (page.parent / path).exists():
                bad.append(f"{page.name}: {url}")
    return bad


if __name__ == "__main__":
    main()
