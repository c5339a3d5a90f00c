"""Time and memory of `mxfp8 compare` on two parquet files of 10,000,000 rows in different order.

python benchmarks/bench_compare.py          # appends to benchmarks/results/compare.jsonl
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

RESULTS = Path(__file__).parent / "results" / "compare.jsonl"
SEEDS = 5


def write(path: Path, rows: int, run: int) -> None:
    """Every column; rows of the second file are shuffled."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    truth, own, each = np.random.default_rng(0), np.random.default_rng(run + 1), rows // SEEDS
    logit = truth.normal(-2.5, 1, each)
    label = (truth.random(each) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    drifted = [logit + 0.03 * own.normal(size=each) for _ in range(SEEDS)]
    columns = {
        "id": np.tile(np.arange(each), SEEDS),
        "label": np.tile(label, SEEDS),
        "prediction": np.concatenate([1 / (1 + np.exp(-x)) for x in drifted]).astype(np.float32),
        "time": np.tile(np.arange(each), SEEDS),
        "segment": np.tile(truth.integers(0, 12, each).astype(np.int32), SEEDS),
        "seed": np.repeat(np.arange(SEEDS), each),
        "weight": np.ones(each * SEEDS, np.float32),
    }
    order = own.permutation(each * SEEDS) if run else slice(None)
    pq.write_table(pa.table({name: values[order] for name, values in columns.items()}), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for run, name in enumerate("ab"):
            write(Path(folder, f"{name}.parquet"), options.rows, run)
        sizes = [round(Path(folder, f"{name}.parquet").stat().st_size / 1e6) for name in "ab"]
        start = time.monotonic()
        command = [sys.executable, "-m", "mxfp8_recipe.cli", "compare", "a.parquet", "b.parquet"]
        done = subprocess.run(command, cwd=folder, check=False, capture_output=True, text=True)
        wall, used = time.monotonic() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode not in (0, 1, 3):
        sys.exit(done.stderr)
    record = {
        "rows": options.rows,
        "megabytes": sizes,
        "exit_code": done.returncode,
        "wall_s": round(wall, 1),
        "cpu_s": round(used.ru_utime + used.ru_stime, 1),
        "max_rss_mib": round(used.ru_maxrss / 1024),
        "cpus": os.cpu_count(),
        "load": round(os.getloadavg()[0], 1),
    }
    with options.out.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(record)


if __name__ == "__main__":
    main()
