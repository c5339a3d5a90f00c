"""Measures arms one after the other here, or several at a time in processes of their own.

Small layers leave most of a many-core CPU idle, and threads that wait for each other waste the rest; arms are
independent, so processes with fewer threads each finish sooner. The numbers are the same: a process is told
everything by the configuration, and each has the same number of threads.
"""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any

import torch

from mxfp8_recipe.ab.arms import ARMS
from mxfp8_recipe.ab.config import ABConfig
from mxfp8_recipe.ab.measure import Measured, Measurer

Unit = tuple[int, str]
"""A seed and the name of an arm."""

OnUnitStep = Callable[[Unit, int, float], None]

_REPORT_EVERY = 5
"""Steps between two reports of a process to its parent."""


def measure_here(measurer: Measurer, units: list[Unit], on_step: OnUnitStep) -> Iterator[Measured]:
    """One after the other, in this process."""
    for unit in units:
        yield measurer.measure(unit[0], _arm(unit), lambda rows, loss, unit=unit: on_step(unit, rows, loss))


def measure_in_processes(config: ABConfig, units: list[Unit], on_step: OnUnitStep) -> Iterator[Measured]:
    """`config.jobs` at a time, in order of completion. What an arm raises is raised here."""
    context = multiprocessing.get_context("spawn")
    steps, stop = context.SimpleQueue(), context.Event()
    listener = threading.Thread(target=_listen, args=(steps, on_step), daemon=True)
    listener.start()
    jobs = min(config.jobs, len(units))
    pool = ProcessPoolExecutor(jobs, context, _start_process, (config, steps, stop))
    try:
        futures = [pool.submit(_measure, unit) for unit in units]
        for future in as_completed(futures):
            yield future.result()
    except BaseException:
        stop.set()
        pool.shutdown(wait=True, cancel_futures=True)
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
        steps.put(None)
        listener.join()


class _Stopped(RuntimeError):
    """The parent has no more use for this arm."""


class _Process:
    """State of a worker process."""

    measurer: Measurer
    steps: Any
    stop: Any


def _start_process(config: ABConfig, steps: Any, stop: Any) -> None:
    # Ctrl-C reaches every process of a terminal; the parent decides what it means.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(config.threads)
    _Process.measurer, _Process.steps, _Process.stop = Measurer(config), steps, stop


def _measure(unit: Unit) -> Measured:
    taken = 0

    def on_step(rows: int, loss: float) -> None:
        nonlocal taken
        taken += 1
        if _Process.stop.is_set():
            raise _Stopped
        if taken % _REPORT_EVERY == 1:
            _Process.steps.put((unit, rows, loss))

    return _Process.measurer.measure(unit[0], _arm(unit), on_step)


def _listen(steps: Any, on_step: OnUnitStep) -> None:
    for message in iter(steps.get, None):
        on_step(*message)


def _arm(unit: Unit) -> Any:
    return next(arm for arm in ARMS if arm.name == unit[1])
