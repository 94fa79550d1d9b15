"""A reader's walk in a real browser: the docs site from the disk, then JupyterLab on the tutorials. `make browser`.

.venv-browser/bin/python tests/browser/walk.py JUPYTER SHOTS RECORD [docs] [lab]
"""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from datetime import date
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

from playwright.sync_api import Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
SITE = ROOT / "_docs"
CHECKS: list[str] = []


def check(holds, what: str):
    assert holds, what
    CHECKS.append(what)
    print("ok:", what, flush=True)


# --- the docs site

# text whose contrast with what lies behind it is below 4.5; [words, colour, ground, ratio] each
PALE = """() => {
  const rgba = (c) => { const [r, g, b, a = 1] = c.match(/[\\d.]+/g).map(Number); return [r, g, b, a]; };
  const over = (t, u) => [0, 1, 2].map((i) => t[i] * t[3] + u[i] * (1 - t[3]));
  const light = (c) => c.map((x) => x / 255).map((x) => x <= .03928 ? x / 12.92 : ((x + .055) / 1.055) ** 2.4)
    .reduce((s, x, i) => s + x * [.2126, .7152, .0722][i], 0);
  const ground = (el) => {
    const layers = [];
    for (let e = el; e; e = e.parentElement) layers.push(rgba(getComputedStyle(e).backgroundColor));
    return layers.reverse().reduce((under, layer) => over(layer, under), [255, 255, 255]);
  };
  const bad = [], texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (texts.nextNode()) {
    const el = texts.currentNode.parentElement, words = texts.currentNode.data.trim();
    if (!words || el.closest("script, style, .katex-mathml, .anchorjs-link") || !el.checkVisibility()) continue;
    const behind = ground(el), ink = rgba(getComputedStyle(el).color);
    for (let e = el; e; e = e.parentElement) ink[3] *= Number(getComputedStyle(e).opacity);
    const [a, b] = [light(over(ink, behind)), light(behind)].sort((x, y) => y - x);
    const ratio = (a + .05) / (b + .05);
    if (ratio < 4.5) bad.push([words.slice(0, 30), `${el.tagName}.${el.className}`, ink.join(), behind.join(), ratio.toFixed(2)]);
  }
  return bad;
}"""
LAYOUT = """() => ({
  wide: [...document.querySelectorAll("main .sourceCode pre")].filter((e) => e.scrollWidth > e.clientWidth + 1)
    .map((e) => e.innerText.slice(0, 60)),
  page: document.documentElement.scrollWidth > innerWidth,
  formulas: [...document.querySelectorAll(".katex-error")].map((e) => e.innerText),
  silent: [...document.images].filter((e) => !e.alt.trim()).length,
  broken: [...document.images].filter((e) => e.complete && !e.naturalWidth).length,
  links: [...document.querySelectorAll("a[href]")].map((a) => a.href.split("#")[0])
    .filter((h) => h.startsWith("file:")),
  dark: document.documentElement.classList.contains("quarto-dark"),
})"""


def walk_docs(browser, shots: Path):
    "Every page in both modes; what is wrong is collected and told at once."
    wrong, outside = [], set()
    for mode in ("light", "dark"):
        look_around(browser, mode, shots, wrong, outside)
    (shots / "docs_wrong.txt").write_text("\n".join([*wrong, *outside]))
    check(not outside, "no request leaves the disk")
    assert not wrong, "\n".join(wrong[:40])
    found = "contrast of text 4.5 or more, formulas whole, every link leads somewhere, "
    found += "every picture shown and described, code fits at 1300 px, "
    found += "the first page shows a picture at once"
    for what in found.split(", "):
        check(True, f"{len(list(SITE.rglob('*.html')))} pages, light and dark: {what}")


def look_around(browser, mode: str, shots: Path, wrong: list[str], outside: set[str]):
    "All pages in one mode."
    size = {"width": 1300, "height": 900}
    context = browser.new_context(viewport=size, color_scheme=mode, offline=True)
    page = context.new_page()
    local = ("file:", "data:", "blob:")
    page.on("request", lambda r: r.url.startswith(local) or outside.add(r.url))
    page.on("pageerror", lambda e: wrong.append(f"{page.url}: {e}"))
    for path in sorted(SITE.rglob("*.html")):
        page.goto(path.as_uri(), wait_until="load")
        page.wait_for_timeout(80)  # the page finds out how dark its ground is
        name, found = f"{path.relative_to(SITE)} ({mode})", page.evaluate(LAYOUT)
        wrong += [f"{name}: not {mode}"] * (found["dark"] != (mode == "dark"))
        for kind in ("wide", "page", "formulas", "silent", "broken"):
            wrong += [f"{name}: {kind} {found[kind]}"] if found[kind] else []
        lost = {h for h in found["links"] if not Path(unquote(urlsplit(h).path)).exists()}
        wrong += [f"{name}: leads nowhere: {h}" for h in lost]
        wrong += [f"{name}: pale {x}" for x in page.evaluate(PALE)]
    for name in ("index", "method/losses", "configuration", "tutorials/idea_in_a_minute"):
        page.goto((SITE / f"{name}.html").as_uri())
        page.wait_for_timeout(200)
        page.screenshot(path=shots / f"docs_{mode}_{Path(name).name}.png")
    page.goto((SITE / "index.html").as_uri())
    box = page.locator("main img").first.bounding_box()
    wrong += [] if box and box["y"] < 900 else ["the first page shows no picture at once"]
    context.close()


def search(browser, shots: Path):
    page = browser.new_page(viewport={"width": 1300, "height": 900}, offline=True)
    page.goto((SITE / "index.html").as_uri())
    for asked, *wanted in (
        ("kl_coef", "configuration.html#update.loss", "losses.html#lossconfig"),
        ("LossConfig", "LossConfig"),
        ("custom reward", "replace.html#a-reward"),
        ("gradient accumulation", "configuration.html#update"),
        ("multi gpu", "scale_out.html"),
        ("filter_groups.rule", "configuration.html#filter_groups"),
        ("compute_advantages", "advantages.html#compute_advantages"),
        ("TokenPolicy.generate", "policies.tokens.html#tokenpolicy.generate"),
    ):
        page.get_by_label("Search").fill(asked)
        page.wait_for_timeout(1000)
        page.locator(".search-result").first.wait_for()
        hits = page.locator(".search-result").all()[: len(wanted)]
        said = [f"{h.get_attribute('href')} {h.inner_text()}" for h in hits]
        page.screenshot(path=shots / f"docs_search_{asked}.png")
        check(not page.evaluate(PALE), f"what the search for {asked} finds can be read")
        assert all(w in s for w, s in zip(wanted, said, strict=True)), f"{asked}: {said}"
        check(True, f"search for {asked} finds {', then '.join(wanted)}")
    page.locator(".search-result").first.click()
    page.wait_for_load_state()
    check("#" in page.url, "a result of the search leads to its section")
    page.close()


# --- JupyterLab


def notebook(path: Path, *cells: str):
    "A notebook of these code cells."
    empty = {"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": []}
    body = [{**empty, "id": f"c{i}", "source": c} for i, c in enumerate(cells)]
    about = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    kind = {"metadata": about, "nbformat": 4, "nbformat_minor": 5}
    path.write_text(json.dumps({"cells": body} | kind))


def fresh(source: Path, to: Path):
    "A copy of a notebook that shows nothing yet."
    nb = json.loads(source.read_text(encoding="utf-8"))
    for cell in nb["cells"]:
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    to.write_text(json.dumps(nb))


@contextlib.contextmanager
def serving(jupyter: str, folder: Path):
    "The address of a JupyterLab of its own on a folder."
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    home = folder.parent / "home"
    settings = home / "@jupyterlab/notebook-extension/tracker.jupyterlab-settings"
    settings.parent.mkdir(parents=True)
    settings.write_text('{"windowingMode": "none"}')  # cells out of sight stay in the page
    news = home / "@jupyterlab/apputils-extension/notification.jupyterlab-settings"
    news.parent.mkdir(parents=True)
    news.write_text('{"fetchNews": "false", "checkForUpdates": false}')
    env = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "WANDB_MODE": "disabled"}
    env |= {"JUPYTER_CONFIG_DIR": str(home), "JUPYTERLAB_SETTINGS_DIR": str(home)}
    command = [jupyter, "lab", "--no-browser", "--allow-root", f"--port={port}"]
    command += ["--IdentityProvider.token=", f"--ServerApp.root_dir={folder}"]
    with open(folder.parent / "jupyter.log", "w") as log:
        server = subprocess.Popen(command, env=env, stdout=log, stderr=log, cwd=folder)
    try:
        for _ in range(240):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/api")
                break
            time.sleep(0.5)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


class Lab:
    "One notebook, open in JupyterLab."

    def __init__(self, page: Page, address: str, name: str):
        self.page = page
        page.goto(f"{address}/lab/tree/{name}?reset")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=120_000)
        page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]", timeout=120_000)
        asked = page.locator(".jp-Dialog .jp-mod-accept")  # which kernel, on a server's first start
        if asked.count():
            asked.click()

    def cell(self, i: int):
        "The i-th code cell."
        return self.page.locator(".jp-Notebook .jp-CodeCell").nth(i)

    def menu(self, *path: str):
        self.page.get_by_role("menuitem", name=path[0], exact=True).click()
        self.page.locator(".lm-Menu-item", has_text=path[1]).first.click()

    def run(self, i: int):
        "Ctrl-Enter, again where the notebook was not ready to hear it."
        before = self.prompt(i)
        for _ in range(5):
            self.cell(i).locator(".cm-content").click()
            self.page.keyboard.press("Control+Enter")
            for _ in range(20):
                if self.prompt(i) != before:
                    return
                time.sleep(0.5)
        raise AssertionError(f"cell {i} does not start")

    def finish(self, *cells: int):
        for i in cells:
            self.run(i)
            self.done(i)

    def prompt(self, i: int) -> str:
        return self.cell(i).locator(".jp-InputPrompt").first.inner_text()

    def pictures(self, i: int) -> int:
        return self.cell(i).locator(".jp-OutputArea img").count()

    def text(self, i: int) -> str:
        return self.cell(i).locator(".jp-OutputArea").first.inner_text()

    def wait(self, holds, what: str, seconds=600):
        for _ in range(2 * seconds):
            if holds():
                return
            time.sleep(0.5)
        raise AssertionError(f"not within {seconds} s: {what}")

    def done(self, i: int, seconds=600):
        self.wait(lambda: self.prompt(i).strip("[]: ").isdigit(), f"cell {i} runs", seconds)

    def whole(self, shots: Path, name: str) -> int:
        "Run everything; how many times a live picture was seen in a cell that was still running."
        for _ in range(5):  # again where the notebook was not ready to hear it
            self.menu("Run", "Run All Cells")
            time.sleep(5)
            if any(c in self.prompt(0) for c in "*1"):
                break
        seen = 0
        for i in range(self.page.locator(".jp-Notebook .jp-CodeCell").count()):
            while not self.prompt(i).strip("[]: ").isdigit():
                if self.errors():
                    raise AssertionError(f"{name}: {self.errors()}")
                running = self.page.evaluate(LIVE)
                seen += bool(running)
                if seen == 1 and running:
                    self.cell(i).scroll_into_view_if_needed()
                    self.page.screenshot(path=shots / f"lab_{name}_live.png")
                time.sleep(0.3)
        return seen

    def errors(self) -> list[str]:
        "Errors and warnings that the cells show."
        kinds = (f"[data-mime-type='application/vnd.jupyter.{k}']" for k in ("error", "stderr"))
        said = self.page.locator(", ".join(kinds)).all_inner_texts()
        return [x.strip()[-300:] for x in said if x.strip()]


LIVE = """() => [...document.querySelectorAll(".jp-CodeCell")].filter((c) =>
  c.querySelector(".jp-InputPrompt").innerText.includes("*") && c.querySelector(".jp-OutputArea img")).length"""


def walk_lab(browser, jupyter: str, shots: Path):
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp) / "notebooks"
        folder.mkdir()
        for name in ("first_run", "idea_in_a_minute"):
            fresh(ROOT / f"nbs/tutorials/{name}.ipynb", folder / f"{name}.ipynb")
        notebook(folder / "own.ipynb", *OWN)
        with serving(jupyter, folder) as address:
            page = browser.new_page(viewport={"width": 1300, "height": 1000})
            try:
                by_hand(page, address, shots)
                tutorials(page, address, shots)
            finally:
                page.screenshot(path=shots / "lab_last.png")


def tutorials(page: Page, address: str, shots: Path):
    for name in ("first_run", "idea_in_a_minute"):
        lab = Lab(page, address, f"{name}.ipynb")
        seen = lab.whole(shots, name)
        for i in range(page.locator(".jp-Notebook .jp-CodeCell").count()):
            lab.cell(i).scroll_into_view_if_needed()
            page.screenshot(path=shots / f"lab_{name}_{i:02}.png")
        check(seen > 1, f"{name} runs from top to bottom, with a picture while it trains")
        check(not lab.errors(), f"{name} shows no error and no warning")


OWN = (
    """from grpo_nb.all import *
options = ["steps=24", "run.dir=runs/own", "run.if_exists=resume", "max_seconds=null", "threads=1"]
trainer = GRPO.from_config(load_config(data_path("recipes/quickstart.yaml"), options))""",
    "trainer.fit();",
    "print('stands at', trainer.step_done, 'of', len(trainer.history))",
    "Run.open('runs/own').plot();",
    "import matplotlib.pyplot as plt\nplt.plot([1, 3, 2]);",
    "trainer",
    "print(Run.open('runs/own').events().query('kind == \"resume\"').step.tolist())",
)


def fit_until_a_plot(lab: Lab):
    lab.run(1)
    lab.wait(lambda: "*" in lab.prompt(1) and lab.pictures(1), "a live plot")


def stop(lab: Lab) -> int:
    "The stop button; the step where the training stands."
    lab.page.locator("[data-command='notebook:interrupt-kernel']").first.click()
    lab.done(1)
    lab.finish(2)
    return int(lab.text(2).split()[2])


def by_hand(page: Page, address: str, shots: Path):
    "Stop a training, go on, restart the kernel, go on again; plots of ours leave those of others alone."
    lab = Lab(page, address, "own.ipynb")
    lab.finish(0)
    fit_until_a_plot(lab)
    page.screenshot(path=shots / "lab_own_live.png")
    check(True, "the live plot is seen while fit runs")
    first = stop(lab)
    page.screenshot(path=shots / "lab_own_stopped.png")
    check(0 < first < 24, "the stop button ends fit after a whole step")
    fit_until_a_plot(lab)
    time.sleep(3)
    second = stop(lab)
    check(first < second < 24, "the next fit goes on from there")
    page.locator("[data-command='notebook:restart-kernel']").first.click()
    page.locator(".jp-Dialog .jp-mod-accept").click()
    lab.wait(lambda: page.locator(".jp-Dialog").count() == 0, "the dialog goes", 30)
    lab.finish(0)
    for i, what in ((3, "run.plot(); shows a picture"), (4, "and a later plt.plot still shows")):
        lab.finish(i)
        lab.cell(i).locator(".jp-OutputArea img").first.wait_for(timeout=20_000)
        check(True, what)
    page.screenshot(path=shots / "lab_own_plots.png")
    lab.finish(1, 2, 5, 6)
    went_on = f"[{second}.0]" in lab.text(6)
    check(went_on, "a restarted kernel goes on from the step where it stopped")
    check(lab.text(2).startswith("stands at 24 of 24"), "and trains to the end")
    check(lab.cell(5).locator("table").count() == 1, "a trainer is shown as a table")
    page.screenshot(path=shots / "lab_own_end.png")
    check(not lab.errors(), "nothing of this shows an error or a warning" + "; ".join(lab.errors()))


def main(jupyter: str, shots: str, record: str, *parts: str):
    folder = Path(shots)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with sync_playwright() as p:
        chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
        browser = p.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        version = browser.version
        if not parts or "docs" in parts:
            search(browser, folder)
            walk_docs(browser, folder)
        if not parts or "lab" in parts:
            walk_lab(browser, jupyter, folder)
        browser.close()
    lab = subprocess.run([jupyter, "lab", "--version"], capture_output=True, text=True)
    versions = {"chromium": version, "playwright": metadata.version("playwright")}
    versions |= {"jupyterlab": lab.stdout.strip(), "python": sys.version.split()[0]}
    done = {"parts": parts or ("docs", "lab"), "date": str(date.today()), "versions": versions}
    done["checks"] = CHECKS
    Path(record).write_text(json.dumps(done, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
