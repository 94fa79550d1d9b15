"""Run the benchmarks that need no other library, with small settings. The comparisons with peers are run one by one:
each script's docstring says how, and results/ holds what was measured.

    python tests/bench/run.py
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
JOBS = [
    ["logp_memory.py", "--repeats", "1", "--passes", "2"],
    ["filter_groups.py", "--samples", "64000", "--pairs", "2"],
    ["tracking.py"],
]

if __name__ == "__main__":
    for job in JOBS:
        print(f"== {' '.join(job)}", flush=True)
        subprocess.run([sys.executable, str(HERE / job[0]), *job[1:]], check=True)
