"""Print the newest rows of a results file as a table: share of the ceiling for kernels, ratio to BF16 for the rest.

    python benchmarks/table.py [BENCH ...] [--results FILE]

Of several rows for one case, variant and provider the last one counts.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rows import RESULTS


def newest(path: Path) -> list[dict[str, Any]]:
    """The last row for each bench, case, variant and provider, in the order they first appear."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        rows[row["bench"], row["case"], row.get("variant", ""), row.get("provider", "")] = row
    return list(rows.values())


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """One line a row."""
    table = Table("bench", "case", "variant", "provider", "ms", "of ceiling", "of BF16", "commit", box=None)
    for row in rows:
        share, ratio = row.get("pct_of_ceiling"), row.get("ratio_to_bf16")
        time = f"{row['ms_median']:.4f}" if "ms_median" in row else ""
        table.add_row(
            row["bench"], row["case"], row.get("variant", ""), row.get("provider", ""), time,
            "" if share is None else f"{share:.1f} %", "" if ratio is None else f"{ratio:.2f}x", row["commit"],
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("bench", nargs="*", help="only these benches")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    chosen = [row for row in newest(options.results) if not options.bench or row["bench"] in options.bench]
    show(chosen, Console(width=200))
