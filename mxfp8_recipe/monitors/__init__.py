"""Numerics monitors: the monitor of a training loop, metrics in fp64, and the verdict over seeds and placebos."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mxfp8_recipe.monitors.live.alarms import AlarmLimits
    from mxfp8_recipe.monitors.live.monitor import NumericsAlarm, NumericsMonitor
    from mxfp8_recipe.monitors.live.records import Alarm, AlarmKind, MonitorReport
    from mxfp8_recipe.monitors.live.sinks import JSONLSink, LiveTable, Sink, TensorBoardSink

_HOMES = {
    "Alarm": "live.records",
    "AlarmKind": "live.records",
    "AlarmLimits": "live.alarms",
    "JSONLSink": "live.sinks",
    "LiveTable": "live.sinks",
    "MonitorReport": "live.records",
    "NumericsAlarm": "live.monitor",
    "NumericsMonitor": "live.monitor",
    "Sink": "live.sinks",
    "TensorBoardSink": "live.sinks",
}

__all__ = [
    "Alarm",
    "AlarmKind",
    "AlarmLimits",
    "JSONLSink",
    "LiveTable",
    "MonitorReport",
    "NumericsAlarm",
    "NumericsMonitor",
    "Sink",
    "TensorBoardSink",
]


def __getattr__(name: str) -> Any:
    """Load a name when it is asked for: whoever imports one part of this package pays for that part."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
