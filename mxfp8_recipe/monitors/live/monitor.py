"""The monitor a user attaches to a training loop: what MXFP8 does to each layer, and to the predictions.

    with NumericsMonitor(model, every=100, sinks=[JSONLSink("numerics.jsonl")]) as monitor:
        for batch, labels in data:
            logits = model(batch)
            ...                                  # loss, backward, optimizer step
            monitor.step(logits, labels)

On every hundredth step it listens to the model's own forward and backward, runs the same call once more in BF16 as the
model's shadow, and reads all figures from the device in one transfer. On other steps it counts. Weights, gradients,
random state, buffers and optimizer stay as they would be without it, bit for bit.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mxfp8_recipe.functional.listening import attach, detach
from mxfp8_recipe.monitors.live.alarms import AlarmLimits, Alarms
from mxfp8_recipe.monitors.live.collector import Collector, in_backward
from mxfp8_recipe.monitors.live.comparison import STRAY, Compared, Given, Sampled, compare
from mxfp8_recipe.monitors.live.demotion import DEMOTING, Demotions
from mxfp8_recipe.monitors.live.dumps import dump_operands, dump_path
from mxfp8_recipe.monitors.live.gradient_cosine import cosines, owners, powers
from mxfp8_recipe.monitors.live.layer_report import Packed, Site, pack, sites, unpack
from mxfp8_recipe.monitors.live.loss_scale import HALF, forward_only, gradient_overflow, scale_of
from mxfp8_recipe.monitors.live.predictions import PredictionTracker, default_loss, logits_in
from mxfp8_recipe.monitors.live.ranks import Ranks
from mxfp8_recipe.monitors.live.records import Alarm, AlarmKind, LayerStatistics, MonitorReport
from mxfp8_recipe.monitors.live.shadow_pass import (
    ShadowPass,
    TrainingCall,
    called_module,
    has_compiled_parts,
    plain_module,
)
from mxfp8_recipe.monitors.live.sinks import Sink, Sinks
from mxfp8_recipe.monitors.live.tensor_statistics import SUMS as TENSOR_SUMS

_NONFINITE = TENSOR_SUMS.index("nonfinite")
_THREAD = threading.local()
"""`aside` is set while some monitor runs a model again in this thread: no monitor takes that for a training call."""
Action = Literal["warn", "raise", "demote"]
LossFunction = Callable[[Any, Tensor, Tensor | None], Tensor]


class NumericsAlarm(RuntimeError):
    """Raised by `step` under `action="raise"`; `alarms` are those raised on this step."""

    def __init__(self, alarms: Sequence[Alarm]) -> None:
        super().__init__("\n".join(alarm.message for alarm in alarms))
        self.alarms = tuple(alarms)


class NumericsMonitor:
    """Watches the numerics of a model that a recipe was applied to, while it trains.

    Args:
        model: what the training loop calls: the module, or its DDP or `torch.compile` wrapper.
        every: steps from one report to the next; step 0 is reported.
        sinks: where reports go; see `monitors.sinks`.
        statistics: report layers; without, only predictions are compared with the shadow's, at a fraction of the cost.
        backward: on sampled steps also run forward and backward in both precisions, for the cosine between their
            gradients layer by layer. Costs two steps.
        action: `"warn"`, `"raise"` (`NumericsAlarm`), or `"demote"`: warn, and take the layer that raised an alarm
            back to BF16 for good. Alarms about predictions, and about dead layers, only warn then.
        limits: when alarms are raised.
        tasks: names of the logits' columns; default their numbers.
        logits_of: from the model's output to the logits that `step` is given; default the output itself, its
            `logits`, or its first tensor.
        loss: `loss(output, labels, weights)` for `backward`; default mean cross entropy of `logits_of(output)`.
        window: reports that windowed metrics look back.
        rows: rows of a tensor whose quantization error is measured; amax and NaN are looked for in all.
        dump_dir: where operands of a non-finite block are saved.
        shadow_dtype: what the shadow runs in where neither autocast nor the weights' dtype decides.
        scaler: the `torch.amp.GradScaler` of the loop, if it has one: gradients that overflow under its scale raise no
            alarm until the scale is down to 1.
        process_group: whose ranks are reduced over; default DDP's, or all there are. Every rank has to call `step`.

    Raises:
        ValueError, TypeError: arguments that make no sense.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 100,
        sinks: Sequence[Sink] = (),
        statistics: bool = True,
        backward: bool = False,
        action: Action = "warn",
        limits: AlarmLimits | None = None,
        tasks: Sequence[str] | None = None,
        logits_of: Callable[[Any], Tensor] | None = None,
        loss: LossFunction | None = None,
        window: int = 20,
        rows: int = 1024,
        dump_dir: str | Path = "numerics_dumps",
        shadow_dtype: torch.dtype = torch.bfloat16,
        scaler: Any = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model: got {type(model).__name__}, expected the torch.nn.Module the training calls")
        for name, value in (("every", every), ("window", window), ("rows", rows)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected at least 1")
        if action not in ("warn", "raise", "demote"):
            raise ValueError(f"action: got {action!r}, expected 'warn', 'raise' or 'demote'")
        self.every, self.backward, self.action, self.rows = every, backward, action, rows
        self.dump_dir, self.statistics = Path(dump_dir), statistics
        self.alarms = Alarms(limits or AlarmLimits())
        self._logits_of, self._loss, self.scaler = logits_of or logits_in, loss, scaler
        scale_of(scaler)  # raises for what is none
        self._called, self._plain = called_module(model), plain_module(model)
        self._shadow_pass = ShadowPass(self._plain, shadow_dtype)
        self._ranks = Ranks.of(model, process_group)
        self._sinks = Sinks(sinks)
        self._demotions = Demotions(self._plain)
        self._names = {module: name.replace("_orig_mod.", "") for name, module in self._plain.named_modules()}
        self._collector = self._new_collector()
        self._predictions = PredictionTracker(tasks, window)
        self._handles: list[Any] = []
        self._step = 0
        self._sampled: Sampled | None = None
        self._notes: list[str] = []
        self._warned: set[str] = set()
        if action == "demote" and sites(self._names) and not self._demotions.possible:
            raise ValueError(
                "model: got a part of the model that apply_recipe was given, expected all of it for action='demote', "
                "which writes to its plan"
            )

    def __enter__(self) -> NumericsMonitor:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __deepcopy__(self, memo: Any) -> NumericsMonitor:
        """A copied model keeps its hooks, which do nothing for it; there is one monitor."""
        return self

    def __reduce__(self) -> Any:
        return _Inert, ()

    def start(self) -> NumericsMonitor:
        """Attach two hooks to the model; `with` calls it."""
        if not self._handles:
            self._handles = [
                self._called.register_forward_pre_hook(self._before, with_kwargs=True),
                self._called.register_forward_hook(self._after, with_kwargs=True),
            ]
        return self

    def close(self) -> None:
        """Take the hooks away and close the sinks; `with` calls it."""
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles, self._sampled = [], None
        detach(self._collector)
        self._collector = self._new_collector()
        self._sinks.close()

    @property
    def is_sampled(self) -> bool:
        """Whether the step under way will be reported."""
        return self._step % self.every == 0

    @property
    def _device(self) -> torch.device:
        return next((p.device for p in self._plain.parameters()), torch.device("cpu"))

    @property
    def demoted(self) -> dict[str, str]:
        """Layers taken back to BF16, with the reason."""
        return self._demotions.reasons

    @property
    def overrides(self) -> dict[str, str]:
        """The demoted layers as overrides for `apply_recipe`, to resume from a checkpoint or to start again with."""
        return dict.fromkeys(self.demoted, "bf16")

    @property
    def last_call(self) -> tuple[tuple[Any, ...], dict[str, Any], Any] | None:
        """Arguments, keyword arguments and output of the model's last call on the sampled step under way."""
        s = self._sampled
        return None if s is None else (s.call.args, s.call.kwargs, s.output)

    def step(
        self,
        logits: Tensor | None = None,
        labels: Tensor | None = None,
        weights: Tensor | None = None,
        batch: Any = None,
    ) -> MonitorReport | None:
        """Count a step; on a sampled one, report. Call it once a step, after backward.

        Args:
            logits: (B,), (B, T) or, over classes, (..., C), as the model gave them: no probabilities. None: those that
                were seen. Of several calls of the model since the last step, those of the last are compared.
            labels: of the same shape, in [0, 1]; or integers (...), -100 for none. None: no predictions are compared.
            weights: of the labels' shape, or (B,); None for 1. Where 0, the row is padding or has no label for the
                task, and the label may be anything.
            batch: the arguments of the model's call, which the monitor sees by itself unless the model was compiled in
                place or runs in a CUDA graph: a tuple, a mapping of keywords, or a single argument.

        Returns:
            The report, or None on steps between.

        Raises:
            ValueError, TypeError: shapes that do not fit, labels outside [0, 1], no tensors; of several ranks, on all
                of them where one has them. NumericsAlarm: under `action="raise"`.
        """
        if not self._handles:
            raise RuntimeError("NumericsMonitor.step: the monitor is not attached; use it as a context manager")
        given = Given(logits, labels, weights, batch)
        step, sampled, is_sampled = self._step, self._sampled, self.is_sampled
        self._step, self._sampled = step + 1, None
        if not is_sampled:
            given.check()
            return None
        detach(self._collector)
        started = time.perf_counter()
        collector, self._collector = self._collector, self._new_collector()
        collector.forward_open = True  # of what is run again here
        try:
            report, raised = self._report(step, sampled, collector, given, started)
        finally:
            self._notes = []
        if self._ranks.rank == 0:
            for alarm in raised:
                warnings.warn(alarm.message, stacklevel=2)
            self._sinks.write(report)
        if raised and self.action == "raise":
            raise NumericsAlarm(raised)
        return report

    def _new_collector(self) -> Collector:
        return Collector(self._names, self.rows)

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or _capturing():
            return
        if module is not self._called or _aside() or not self.is_sampled or not torch.is_grad_enabled():
            return
        if self._sampled is not None and self._is_besides(self._sampled):
            return
        self._sampled = Sampled(TrainingCall.now(self._plain, args, kwargs), training=module.training)
        self._collector.forward_open = True
        if self.statistics:
            attach(self._collector)

    def _is_besides(self, before: Sampled) -> bool:
        """Whether a call after `before` is none of the training's: repeated in backward, or an evaluation with a graph.

        Where the evaluation came first, what was heard of it is dropped.
        """
        if in_backward() or (before.training and not self._called.training):
            return True
        if self._called.training and not before.training:
            detach(self._collector)
            self._collector = self._new_collector()
        return False

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        sampled = self._sampled
        if module is not self._called or _aside() or sampled is None or not self._collector.forward_open:
            return
        self._collector.forward_open = False
        sampled.output = output
        started = time.perf_counter()
        sampled.shadow = self._aside("shadow", lambda: self._shadow_pass.shadow(sampled.call))
        self._collector.seconds += time.perf_counter() - started

    def _aside(self, what: str, run: Callable[[], Any]) -> Any:
        """Run the model once more; an error there is a note in the report and no more."""
        _THREAD.aside = True
        try:
            return run()
        except Exception as error:
            self._note(f"{what}: {type(error).__name__}: {error}")
            return None
        finally:
            _THREAD.aside = False

    def _note(self, text: str) -> None:
        self._notes.append(text)
        if text not in self._warned:
            self._warned.add(text)
            warnings.warn(f"NumericsMonitor: {text}", stacklevel=5)

    def _report(
        self, step: int, sampled: Sampled | None, collector: Collector, given: Given, started: float
    ) -> tuple[MonitorReport, list[Alarm]]:
        """The report of a step, and the alarms raised on it."""
        before = collector.seconds
        modules = owners(self._names) if self.backward else []
        rows, device = sites(self._names), self._device
        packed, compared, gradients = self._own(sampled, collector, given, modules, rows)
        holder = torch.where(packed.sums[:, _NONFINITE] > 0, float(self._ranks.rank), -1.0)
        keys = [(site.layer, tensor) for site in rows for tensor in site.tensors]
        places = {key: float(place) for place, key in enumerate(collector.fields)}
        order = torch.tensor([places.get(key, -1.0) for key in keys], dtype=torch.float64, device=device)
        read = self._ranks.read(
            {"sums": packed.sums, "errors": packed.errors, "rows": compared.sums, "gradients": gradients},
            {"maxima": packed.maxima, "largest": compared.largest, "holder": holder, "order": order}
            | {"strays": compared.strays, "half": compared.strays.new_tensor([float(collector.half)])},
        )
        if read["strays"].item() > STRAY:
            self._note(
                "step was given other logits than the model's last call gave, which are compared instead; give what it "
                "returned, no probabilities, with the labels of that call, or say logits_of=lambda output: ..."
            )
        if not rows and not self._demotions.possible:
            self._note("the model has no MXFP8 layer; apply_recipe comes before the monitor")
        for problem in collector.problems.values():
            self._note(problem)
        layers = unpack(Packed(read["sums"], read["maxima"], read["errors"]), rows)
        judged, half = self._judged(layers, bool(read["half"]))
        alarms = self.alarms.check_layers(step, judged, dict(zip(keys, read["order"].tolist())), half)
        holders = dict(zip(keys, read["holder"].tolist()))
        alarms = [self._with_dump(alarm, collector, holders) for alarm in alarms]
        predictions = self._predictions.add(read["rows"], read["largest"], compared.classes)
        for seen, running in zip(predictions, self._predictions.running):
            alarms += self.alarms.check_predictions(step, seen, running.window_sums(), running.classes)
        raised = [alarm for alarm in alarms if not alarm.cleared]
        if self.action == "demote":
            self._demote(raised, rows)
        report = MonitorReport(
            step=step,
            layers=layers,
            predictions=predictions,
            gradient_cosine=cosines(modules, read["gradients"]),
            alarms=tuple(alarms),
            active=self.alarms.active,
            demoted=dict(self.demoted),
            notes=tuple(dict.fromkeys(self._notes)),
            seconds=time.perf_counter() - started + before,
        )
        return report, raised

    def _own(
        self, sampled: Sampled | None, collector: Collector, given: Given, modules: list[Any], rows: list[Site]
    ) -> tuple[Packed, Compared, Tensor]:
        """What this rank has seen. An error in it is raised on every rank, and none waits for the others' sums."""
        device = self._device
        try:
            given.check()
            sampled = self._complete(sampled, collector, given)
            gradients = self._gradient_powers(sampled, collector, given, modules)
            found = pack(collector, rows, device), compare(sampled, given, self._logits_of, device), gradients
        except Exception as error:
            self._ranks.agree(error, {}, device)
            raise
        self._ranks.agree(None, {"tasks": found[1].sums.shape[1], "classes": found[1].classes}, device)
        return found

    def _judged(self, layers: tuple[LayerStatistics, ...], half: bool) -> tuple[tuple[LayerStatistics, ...], bool]:
        """The layers that alarms are about, and whether fp16 gradients may overflow by a scale that was not told."""
        first = gradient_overflow(layers)
        if not first:
            return layers, False
        scale = scale_of(self.scaler)
        (scaled,) = self._ranks.any([scale is not None and scale >= 1], self._device)
        if scaled:
            self._notes.append(f"gradients overflowed at the scaler's scale, in {first} first; it skips such a step")
            return forward_only(layers), False
        if half and scale is None:
            self._note(HALF)
        return layers, half and scale is None

    def _complete(self, sampled: Sampled | None, collector: Collector, given: Given) -> Sampled | None:
        """The sampled call, with what the training's own forward did not show run again."""
        heard = collector if self.statistics else None
        if sampled is None:
            if given.batch is None:
                self._note(
                    "no training forward of the model was seen on this step; give the monitor the object that the loop "
                    "calls (the compiled or wrapped one), or give step(..., batch=...) what it was called with"
                )
                return None
            call = TrainingCall.of_batch(self._plain, given.batch)
            sampled = Sampled(call, replayed=True)
            sampled.output = self._aside("probe", lambda: self._shadow_pass.probe(call, heard))
            sampled.shadow = self._aside("shadow", lambda: self._shadow_pass.shadow(call))
        elif (
            heard and has_compiled_parts(self._called) and {site.layer for site in sites(self._names)} - collector.heard
        ):
            call = sampled.call
            self._aside("probe", lambda: self._shadow_pass.probe(call, heard))
        elif collector.heard and not any(tensor == "grad_output" for _, tensor in collector.fields):
            self._note("step was called before backward: grad_output was not seen; call it after")
        return sampled

    def _gradient_powers(
        self, sampled: Sampled | None, collector: Collector, given: Given, modules: list[Any]
    ) -> Tensor:
        """What the cosines are made of; zeros where the gradients could not be had."""
        nothing = torch.zeros(len(modules), 3, dtype=torch.float64, device=self._device)
        if sampled is None or not modules:
            return nothing
        if given.labels is None:
            self._note("backward=True needs labels in step(logits, labels), or a loss that does without")
            return nothing
        parameters: list[Tensor] = [p for _, own in modules for p in own]

        def loss(output: Any) -> Tensor:
            assert given.labels is not None
            if self._loss is not None:
                return self._loss(output, given.labels, given.weights)
            return default_loss(self._logits_of(output), given.labels, given.weights)

        def ask(high: bool) -> dict[Tensor, Tensor | None] | None:
            unseen = not any(tensor == "grad_output" for _, tensor in collector.fields)
            heard = collector if self.statistics and unseen and not high else None
            run = self._shadow_pass.gradients
            found = self._aside("backward", lambda: run(sampled.call, loss, parameters, high=high, listener=heard))
            return None if found is None else dict(zip(parameters, found))

        mxfp8, shadow = ask(high=False), ask(high=True)
        if mxfp8 is None or shadow is None:
            return nothing
        if all(grad is None for grad in mxfp8.values()):
            self._note("backward: no parameter got a gradient; checkpoint with use_reentrant=False")
        return powers(modules, mxfp8, shadow).to(self._device)

    def _with_dump(self, alarm: Alarm, collector: Collector, holders: dict[tuple[str, str], float]) -> Alarm:
        """The alarm with the file of its operands, which the last rank that holds such a block writes."""
        if alarm.kind is not AlarmKind.NONFINITE or alarm.cleared:
            return alarm
        rank = int(holders.get((alarm.layer, alarm.tensor), -1))
        path = dump_path(self.dump_dir, alarm.step, alarm.layer, alarm.tensor, rank)
        try:
            if rank == self._ranks.rank:
                dump_operands(path, collector, alarm.step, alarm.layer, alarm.tensor)
        except (OSError, RuntimeError) as error:  # torch.save has both
            self._note(f"dump: {error}")
            return alarm
        return alarm.model_copy(update={"dump": str(path), "message": f"{alarm.message}; operands in {path}"})

    def _demote(self, raised: list[Alarm], rows: list[Site]) -> None:
        """Take the layers that raised alarms back to BF16, the same on every rank."""
        modules = list(dict.fromkeys(site.module for site in rows))
        module_of = {site.layer: site.module for site in rows}
        causes: dict[str, Alarm] = {}
        for alarm in raised:
            if alarm.kind in DEMOTING and alarm.layer in module_of:
                causes.setdefault(module_of[alarm.layer], alarm)
        for module, wanted in zip(modules, self._ranks.any([m in causes for m in modules], self._device)):
            if wanted:
                self._demotions.demote(module, causes.get(module))
                for site in rows:
                    if site.module == module:
                        self.alarms.forget(site.layer)


def _aside() -> bool:
    return getattr(_THREAD, "aside", False)


def _capturing() -> bool:
    """Whether a CUDA graph is being captured, whose replays no hook sees."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class _Inert:
    """What a pickled model has in place of its monitor."""

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        pass

    def _after(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        pass
