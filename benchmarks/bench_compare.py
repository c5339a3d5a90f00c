"""Time and memory of `mxfp8 compare` on two parquet files of 10,000,000 rows in different order.

python benchmarks/bench_compare.py                          # appends to benchmarks/results/compare.jsonl
python benchmarks/bench_compare.py --ids text --seeds 1     # ids such as u0000000123; hex: 32 digits

One seed is the largest case: the metrics take a seed at a time. The files are written by a process of their own, since
the peak that the kernel reports of a program is at least that of the process that started it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

RESULTS = Path(__file__).parent / "results" / "compare.jsonl"
CHUNK = 1 << 18


def ids_of(numbers: np.ndarray, kind: str) -> Any:
    """These ids as an arrow column: the numbers themselves, or a text for each."""
    import pyarrow as pa

    if kind == "numbers":
        return pa.array(numbers)
    text = {"text": lambda n: f"u{n:010d}", "hex": lambda n: f"{n * 0x9E3779B97F4A7C15F39CC0605CEDC835 % 2**128:032x}"}
    parts = [numbers[start : start + CHUNK].tolist() for start in range(0, len(numbers), CHUNK)]
    return pa.chunked_array([pa.array(map(text[kind], part), pa.string()) for part in parts])


def write(path: Path, rows: int, run: int, ids: str, seeds: int) -> None:
    """Every column; rows of the second file are shuffled."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    truth, own, each = np.random.default_rng(0), np.random.default_rng(run + 1), rows // seeds
    logit = truth.normal(-2.5, 1, each)
    label = (truth.random(each) < 1 / (1 + np.exp(-logit))).astype(np.float32)
    drifted = [logit + 0.03 * own.normal(size=each) for _ in range(seeds)]
    columns = {
        "id": np.tile(np.arange(each), seeds),
        "label": np.tile(label, seeds),
        "prediction": np.concatenate([1 / (1 + np.exp(-x)) for x in drifted]).astype(np.float32),
        "time": np.tile(np.arange(each), seeds),
        "segment": np.tile(truth.integers(0, 12, each).astype(np.int32), seeds),
        "seed": np.repeat(np.arange(seeds), each),
        "weight": np.ones(each * seeds, np.float32),
    }
    order = own.permutation(each * seeds) if run else slice(None)
    columns = {name: values[order] for name, values in columns.items()}
    pq.write_table(pa.table(columns | {"id": ids_of(columns["id"], ids)}), path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--ids", choices=("numbers", "text", "hex"), default="numbers")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder, f"{name}.parquet") for name in "ab"]
        for run, path in enumerate(paths):
            arguments = (path, options.rows, run, options.ids, options.seeds)
            writer = multiprocessing.get_context("spawn").Process(target=write, args=arguments)
            writer.start()
            writer.join()
        sizes = [round(path.stat().st_size / 1e6) for path in paths]
        start = time.monotonic()
        command = [sys.executable, "-m", "mxfp8_recipe.cli", "compare", "a.parquet", "b.parquet"]
        with Path(folder, "said").open("w+") as said:
            process = subprocess.Popen(command, cwd=folder, stdout=said, stderr=said)
            _, status, used = os.wait4(process.pid, 0)
            wall, process.returncode = time.monotonic() - start, os.waitstatus_to_exitcode(status)
            said.seek(0)
            if process.returncode not in (0, 1, 3):
                sys.exit(said.read())
    record = {
        "rows": options.rows,
        "ids": options.ids,
        "seeds": options.seeds,
        "megabytes": sizes,
        "exit_code": process.returncode,
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
