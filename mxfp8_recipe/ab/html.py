"""`report.html`: one self-contained page, readable offline and on a phone."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

try:
    import jinja2
except ImportError as error:  # pragma: no cover - needs an environment without the extra
    raise ModuleNotFoundError('the report needs jinja2: pip install "mxfp8-recipe[ab]"', name="jinja2") from error

from mxfp8_recipe.ab import plots, tables


def render(report: dict[str, Any]) -> str:
    """The page for a report of `report.build_report`."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["percent"] = tables.percent
    environment.filters["number"] = tables.number
    template = (resources.files("mxfp8_recipe.ab") / "report.html.j2").read_text(encoding="utf-8")
    tasks = report["data"]["tasks"]
    drawn: dict[str, Any] = {
        task: {"ne": plots.windowed_ne(report, task), "calibration": plots.calibration_curve(report, task)}
        for task in tasks
    }
    quantized = any(layer["quantized"] for layer in report["same_weights"]["layers"])
    planned = tables.plan(report)
    return environment.from_string(template).render(
        report=report,
        power_sentence=tables.power_sentence(report),
        delta=tables.delta(report),
        arms={task: tables.arms(report, task) for task in tasks},
        gates=tables.gates(report),
        agreement=tables.agreement(report),
        layers=tables.layers(report),
        plan={**vars(planned), "quantized": sum(bool(x["new_type"]) for x in report["plan"])},
        plots={**drawn, "sqnr": plots.layer_sqnr(report) if quantized else ""},
    )


def write_html(report: dict[str, Any], path: Path) -> None:
    """Whole or not at all."""
    scratch = path.with_suffix(".tmp")
    scratch.write_text(render(report), encoding="utf-8")
    scratch.replace(path)
