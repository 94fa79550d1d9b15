"Shared by the benchmarks: environment report, memory counters, medians, alternating runs."

import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
median = statistics.median


def environment(*packages) -> dict:
    "What a reader needs to judge a timing."
    try:
        cpu = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text()).group(1)
    except (OSError, AttributeError):
        cpu = platform.processor()
    versions = {}
    for name in ("torch", "numpy", "transformers", *packages):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            pass
    return dict(
        cpu=cpu,
        cores=os.cpu_count(),
        load=round(os.getloadavg()[0], 2),
        python=platform.python_version(),
        date=time.strftime("%Y-%m-%d"),
        versions=versions,
    )


def environment_of(python, *packages) -> dict:
    "The same of the environment of another library."
    code = f"import json, common; print(json.dumps(common.environment(*{packages!r})))"
    return child([python, "-c", code], cwd=Path(__file__).parent)


def rss_mb() -> float:
    "Resident memory now (Linux)."
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE") / 2**20


def reset_peak():
    "Start the kernel's high-water mark of this process again (Linux)."
    Path("/proc/self/clear_refs").write_text("5")


def peak_mb() -> float:
    "Highest resident memory since `reset_peak`."
    return int(re.search(r"VmHWM:\s+(\d+)", Path("/proc/self/status").read_text()).group(1)) / 1024


def child(cmd, cwd=None, env=None) -> dict:
    "Run a benchmark process; its last line of output is one JSON object."
    p = subprocess.run([str(c) for c in cmd], capture_output=True, text=True, cwd=cwd, env=env)
    if p.returncode:
        sys.exit(f"{' '.join(map(str, cmd))}\n{p.stderr[-3000:]}")
    return json.loads(p.stdout.strip().splitlines()[-1])


def table(rows: list[dict]) -> str:
    "Rows as a markdown table."
    keys = list(dict.fromkeys(k for r in rows for k in r))
    out = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    return "\n".join(
        out + ["| " + " | ".join(str(r.get(k, "")) for k in keys) + " |" for r in rows]
    )


def command() -> str:
    "The command that runs, without the paths of this machine."
    words = [f"tests/bench/{Path(sys.argv[0]).name}", *sys.argv[1:]]
    return " ".join(["python", *(re.sub(r".*/bin/python\S*", "PEER/bin/python", x) for x in words)])


def save(name: str, title: str, rows: list[dict], env: dict, notes: str, raw: list | dict):
    "Write a result table, with what made it, to results/NAME.md, and the raw numbers to NAME.json."
    RESULTS.mkdir(exist_ok=True)
    facts = (
        f"{env['cpu']}, {env['cores']} cores, Python {env['python']}, {env['date']}; "
        + ", ".join(f"{k} {v}" for k, v in env["versions"].items())
    )
    text = f"# {title}\n\n{table(rows)}\n\n{notes.strip()}\n\nCommand: `{command()}`\n\nMachine: {facts}\n"
    (RESULTS / f"{name}.md").write_text(text)
    (RESULTS / f"{name}.json").write_text(json.dumps(raw) + "\n")
    print(text)
