"""Build the docs site in _docs/ without Quarto: nbdev processes the notebooks, smalldocs renders them.

The site works from disk and offline: maths (KaTeX) is vendored, links are relative, `source` links point to copies of
the modules. A reader with Quarto can run `nbdev_docs` on the same sources instead.
"""

import html
import importlib
import inspect
import json
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


def signature(f, eval_str=True):
    "The signature; names that no module can look up, of classes further down or for type checkers only, stay text."
    try:
        return inspect.signature(f, eval_str=eval_str)
    except NameError:
        return inspect.signature(f)


def main():
    from fastcore import docments
    from nbdev import serve
    from nbdev.config import get_config
    from nbdev.quarto import refresh_quarto_yml

    os.chdir(ROOT)
    sys.path[:0] = [
        str(ROOT / "studies"),
        str(ROOT / "data" / "build"),
    ]  # notebooks show their parts
    cfg = get_config()
    refresh_quarto_yml()
    options = ROOT / "nbs" / "_quarto.yml"
    two_modes = "theme: {light: cosmo, dark: darkly}"
    options.write_text(options.read_text().replace("theme: cosmo", two_modes))
    docments.signature = signature
    for name in ("grpo_nb.all", "peft", "scipy.stats", "matplotlib.pyplot"):
        importlib.import_module(name)  # once, not in each worker
    serve.IN_NOTEBOOK = True  # workers are forks, with the lines above
    proc = Path(serve.proc_nbs("nbs", n_workers=2, force=True))
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
        text = re.sub(
            r"\[\[(`[^`]+`)\]\([^)]*\)\]\(", r"[\1](", text
        )  # nbdev links names in links, too
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
        text = re.sub(r"\[`([\w.]+)`\]\(([^)\s]+)\)", r'<a href="\2">\1</a>', text)  # in signatures
        text = re.sub(r'(<(?:script|link)[^>]*?)\s+integrity="[^"]*"', r"\1", text)
        page.write_text(name_pictures(link_papers(text)), encoding="utf-8")
    for css in SITE.rglob("*.css"):
        text = css.read_text(encoding="utf-8")
        css.write_text(re.sub(r"@import url\(https?:[^)]*\);?", "", text), encoding="utf-8")
    search_from_disk()
    problems = check_links(pages)
    shutil.rmtree(proc, ignore_errors=True)
    print(f"{len(pages)} pages in {SITE.relative_to(ROOT)}/index.html")
    if problems:
        sys.exit("Broken links:\n" + "\n".join(problems))


def link_papers(text: str) -> str:
    "arXiv numbers in running text lead to their papers."
    kept = r"(<(a|pre|code|script|style|title)\b.*?</\2>|<[^>]*>)"
    parts = re.split(kept, text, flags=re.S)
    paper = r"(?<![\w./])(?:arXiv[: ])?([12]\d(?:0[1-9]|1[0-2])\.\d{5})(?!\d)"
    link = r'<a href="https://arxiv.org/abs/\1">\g<0></a>'
    parts[::3] = [re.sub(paper, link, part) for part in parts[::3]]
    del parts[2::3]  # the names of the tags
    return "".join(parts)


def name_pictures(text: str) -> str:
    "A picture that says nothing is described by the paragraph or heading before it, which is where a notebook says what to see."
    said = [
        (m.end(), html.unescape(re.sub("<[^>]*>", "", m[2])))
        for m in re.finditer(r"<(p|h[1-6])\b[^>]*>(.*?)</\1>", text, re.S)
    ]

    def named(img):
        before = [words for end, words in said if end <= img.start() and words.strip()]
        alt = html.escape(" ".join(before[-1].split()))
        return f'<img alt="{alt}"{img[1]}'

    return re.sub(r"<img((?![^>]*\balt=)[^>]*>)", named, text)


RANKED = """window.ranked = (asked) => {  // entries with every word, the heading before the text
  const plain = (t) => t.toLowerCase().replace(/[\\s_-]+/g, " ").trim();
  const q = plain(asked), words = q.split(" ");
  const share = (t, edge = "") => words.filter((w) => `${edge}${t}`.includes(`${edge}${w}`)).length / words.length;
  const whole = (t) => ` ${t.replace(/[^a-z0-9. ]/g, " ")} `.includes(` ${q} `);
  const value = (e) => {
    const [title, section, text] = [e.title, e.section, e.text].map(plain);
    if (share(`${title} ${section} ${text}`) < 1) return 0;
    const named = (e.also || []).includes(q) || !section && whole(title) ? 18 : [section, section.split(".").pop()].includes(q) ? 9 : 0;
    return named + 6 * whole(section) + 3 * section.includes(q) + share(section, " ") + whole(title) + 2 * text.includes(q)
      + /^[a-z]+config$/.test(section) + 1;
  };
  return window.searchIndex.map((e) => [value(e), e]).filter((v) => v[0]).sort((a, b) => b[0] - a[0]).map((v) => v[1]);
};"""


def search_from_disk():
    "The index becomes a script, as a page on the disk may fetch nothing; sections that name what was asked come first."
    from grpo_nb.config import describe
    from grpo_nb.lab.recipe import GRPOConfig

    index = json.loads((SITE / "search.json").read_text(encoding="utf-8"))
    for row in describe(GRPOConfig):
        section, _, _ = row["key"].rpartition(".")
        href = f"configuration.html#{section or 'top-level'}"
        text = f"{row['meaning']} ({row['accepts']}; default {row['default']})"
        index.append(dict(title="Configuration", section=row["key"], text=text, href=href))
    page = (SITE / "integrations" / "coming_from.html").read_text(encoding="utf-8")
    _, _, table = page.partition('id="words-side-by-side"')
    for words, ours in re.findall(
        "<tr>\\s*<td.*?>(.*?)</td>\\s*<td.*?>(.*?)</td>", table.partition("</table>")[0], re.S
    ):
        (href,) = re.findall('href="([^"]*)"', ours)
        href = (
            os.path.normpath(f"integrations/{href}")
            if href[0] != "#"
            else f"integrations/coming_from.html{href}"
        )
        words, text = (html.unescape(re.sub("<[^>]*>", "", x)) for x in (words, ours))
        also = re.split(", ", words.lower().replace("_", " "))
        index.append(dict(title="Coming from TRL", section=words, text=text, href=href, also=also))
    script = f"window.searchIndex = {json.dumps(index)};\n{RANKED}"
    (SITE / "search.js").write_text(script, encoding="utf-8")
    (script,) = SITE.rglob("smalldocs.js")
    text = script.read_text(encoding="utf-8")
    for old, new in [
        (
            'const r = await fetch(offset + "search.json");\n      index = await r.json();',
            """await new Promise((done) => {
        const s = document.createElement("script");
        Object.assign(s, { src: offset + "search.js", onload: done, onerror: done });
        document.head.append(s);
      });
      index = window.searchIndex || [];""",
        ),
        (
            "fuse.search(q, { limit }).map((h) => h.item)",
            """(window.ranked(q).length ? window.ranked(q) : fuse.search(q).map((h) => h.item)).slice(0, limit)""",
        ),
    ]:
        assert old in text, f"smalldocs.js no longer holds {old}"
        text = text.replace(old, new)
    script.write_text(text, encoding="utf-8")


def check_links(pages) -> list[str]:
    "Links, anchors and pictures that lead nowhere, pictures without words, formulas that KaTeX refuses, and what would be loaded from the network."
    bad, texts = [], {p.resolve(): p.read_text(encoding="utf-8") for p in pages}
    for page, text in texts.items():
        for kind, rest, url, name in re.findall(
            r'<(script|link|img|a)\b([^>]*?)(?:href|src)="([^"]+)"[^>]*>(<code>)?', text
        ):
            if re.match(r"(https?:)?//", url):
                if kind in ("script", "img") or (kind == "link" and "stylesheet" in rest):
                    bad.append(f"{page.name}: {kind} from the network: {url}")
                continue
            if re.match(r"(data|mailto|javascript):", url):
                continue
            path, _, anchor = url.split("?")[0].partition("#")
            target = (page.parent / path).resolve() if path else page
            if not target.exists():
                bad.append(f"{page.name}: {url}")
            elif (
                kind == "a"
                and anchor
                and not name  # of code: nbdev wrote it, and a method may have no entry of its own
                and f'id="{anchor}"' not in texts.get(target, f'id="{anchor}"')
            ):
                bad.append(f"{page.name}: no such place: {url}")
        bad += [
            f"{page.name}: no link: {x}"
            for x in re.findall(r"\]\([^)\s]+\.(?:html|ipynb)[^)]*\)", text)
        ]
        silent = re.findall(r'<img(?![^>]*\balt="[^"]).*?>', text)
        bad += [f"{page.name}: a picture without words: {x[:80]}" for x in silent]
        bad += [
            f"{page.name}: formula {x}"
            for x in re.findall(r"[_^]\\(?:max|min|log|exp|operatorname)\b", text)
        ]
    for css in SITE.rglob("*.css"):
        found = re.findall(r"url\([\"']?(?:https?:)?//[^)]*", css.read_text(encoding="utf-8"))
        bad += [f"{css.name} from the network: {x}" for x in found]
    return bad


if __name__ == "__main__":
    main()
