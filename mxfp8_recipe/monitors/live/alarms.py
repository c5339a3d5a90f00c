"""Alarms with hysteresis: a value has to stay beyond its limit to raise one, and to come well back to clear it.

Each rule watches one figure of one tensor, or of one task's predictions, from report to report. Limits relative to a
baseline compare with the median of the last quiet reports, so that slow changes of a healthy training follow along, and
an absolute limit beside it catches what was wrong from the start.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from statistics import median

from mxfp8_recipe.monitors.live.records import GRADIENTS, Alarm, AlarmKind, LayerStatistics, ShadowAgreement

PREDICTIONS = "predictions"
"""Stands for the tensor in alarms about a task."""

Subject = tuple[AlarmKind, str, str]
"""What, layer, tensor."""


@dataclass(frozen=True, kw_only=True)
class AlarmLimits:
    """When an alarm is raised. Each is cleared at half its distance from the baseline, or at half its limit.

    Attributes:
        sqnr_drop_db: below the baseline by this much. sqnr_floor_db: or below this, whatever the baseline.
        sqnr_usual_db: what the format gives a tensor without structure; a baseline above it counts as this. Zeros and
            powers of two, as gradients of a layer that starts at zero have them, are exact and do not last.
        underflow_growth, saturation_growth: above the baseline by this share of the elements.
        underflow_limit, saturation_limit: or above this, whatever the baseline. P is exempt from the former: softmax
            makes what does not matter small.
        outlier_growth: the largest scale's exponent above the baseline by this much: one value outgrows the rest, which
            in a wide layer moves neither SQNR nor underflow of the whole. Half more for gradients, which swing more.
        calibration_drift: |sum p_mxfp8 / sum p_shadow - 1| over the window; and half the growth of |log calibration|
            against the labels since its best, where that is off by more than `calibration_sigmas` standard errors.
        flattening: share of the predictions' information (1 - their mean entropy over that of their mean, or of
            equally likely classes) lost against the shadow, or against the median of the last quiet reports.
        settling: reports before predictions are compared with earlier ones: a training starts far from where it stays.
        settling_rows: rows of a task, labeled, that the window must hold to be compared with earlier ones.
        patience: reports in a row. baseline: quiet reports the median is taken of.
    """

    sqnr_drop_db: float = 6.0
    sqnr_floor_db: float = 15.0
    sqnr_usual_db: float = 31.0
    underflow_growth: float = 0.1
    underflow_limit: float = 0.5
    saturation_growth: float = 0.03
    saturation_limit: float = 0.1
    outlier_growth: float = 10.0
    calibration_drift: float = 0.1
    calibration_sigmas: float = 5.0
    flattening: float = 0.5
    settling: int = 10
    settling_rows: int = 256
    patience: int = 2
    baseline: int = 20

    def __post_init__(self) -> None:
        bad = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if not getattr(self, f.name) > 0]
        if bad:
            raise ValueError(f"AlarmLimits: got {', '.join(bad)}, expected values above 0")


@dataclass
class _Watch:
    """One figure from report to report."""

    history: deque[float]
    beyond: int = 0
    active: bool = False


@dataclass(frozen=True)
class _Crossing:
    """A figure now: how far it is from where it was, in units of its limit; 1 is the limit."""

    excess: float
    value: float
    limit: float
    baseline: float | None
    text: str


@dataclass
class Alarms:
    """All watches of one monitor. Every rank must give it the same figures; it answers the same then."""

    limits: AlarmLimits = field(default_factory=AlarmLimits)
    watches: dict[Subject, _Watch] = field(default_factory=dict)
    best_calibration: dict[str, float] = field(default_factory=dict)
    reports: dict[str, int] = field(default_factory=dict)

    @property
    def active(self) -> tuple[str, ...]:
        """What stands, as `kind layer tensor`."""
        return tuple(f"{kind.value} {layer} {tensor}" for (kind, layer, tensor), w in self.watches.items() if w.active)

    def forget(self, layer: str) -> None:
        """Stop watching a layer."""
        for subject in [s for s in self.watches if s[1] == layer]:
            del self.watches[subject]

    def check_layers(
        self, step: int, layers: Iterable[LayerStatistics], order: Mapping[tuple[str, str], float], half: bool = False
    ) -> list[Alarm]:
        """Alarms raised or cleared by a report's layers.

        Args:
            order: when each tensor was first seen in the step. Alarms come in this order, causes before what follows
                from them; of several tensors with NaN or Inf only the first is named, and the others are counted.
            half: gradients may hold NaN or Inf because an fp16 loss is scaled: only `patience` reports in a row count.
        """
        found: list[Alarm] = []
        tensors = [(layer, name, t) for layer in layers for name, t in layer.tensors.items()]
        tensors.sort(key=lambda row: order.get((row[0].layer, row[1]), len(order)))
        broken = [(layer.layer, name) for layer, name, t in tensors if t.nonfinite_blocks]
        first = broken[0] if broken else None
        for layer, name, t in tensors:
            where = (layer.layer, name)
            if t.nonfinite_blocks and where != first:
                continue
            others = f"; {len(broken) - 1} tensors after it have some too" if len(broken) > 1 else ""
            text = f"{t.nonfinite_blocks} of {t.blocks} blocks hold NaN or Inf{others}"
            nonfinite = _Crossing(2.0 * bool(t.nonfinite_blocks), float(t.nonfinite_blocks), 0.0, None, text)
            patience = None if half and name in GRADIENTS else 1
            found += self._judge(step, (AlarmKind.NONFINITE, *where), nonfinite, patience)
            if t.nonfinite_blocks:
                continue
            dead = _Crossing(2.0 * (t.amax == 0), t.amax, 0.0, None, "every element is zero")
            found += self._judge(step, (AlarmKind.DEAD, *where), dead)
            if t.amax == 0:
                continue
            if t.sqnr_db is not None and not math.isinf(t.sqnr_db):
                found += self._judge(step, (AlarmKind.SQNR, *where), self._sqnr(where, t.sqnr_db))
            for kind, value in ((AlarmKind.UNDERFLOW, t.underflow_frac), (AlarmKind.SATURATION, t.saturation_frac)):
                found += self._judge(step, (kind, *where), self._share(kind, where, value))
            if t.scale_max is not None and name != "probs":
                outlier = (AlarmKind.OUTLIER, *where)
                found += self._judge(step, outlier, self._outlier(outlier, t.scale_max, t.amax))
        for layer in layers:
            for gemm, sqnr_db in layer.gemm_sqnr_db.items():
                if sqnr_db is not None and not math.isinf(sqnr_db):
                    where = (layer.layer, gemm)
                    found += self._judge(step, (AlarmKind.SQNR, *where), self._gemm(where, sqnr_db))
        return found

    def check_predictions(
        self, step: int, seen: ShadowAgreement, sums: dict[str, float], classes: int = 0
    ) -> list[Alarm]:
        """Alarms raised or cleared by one task.

        Args:
            sums: those of `predictions.SUMS` over its window. classes: how many, 0 for a binary task.
        """
        self.reports[seen.task] = self.reports.get(seen.task, 0) + 1
        calibration = (AlarmKind.CALIBRATION, seen.task, PREDICTIONS)
        flattening = (AlarmKind.FLATTENING, seen.task, PREDICTIONS)
        found = self._judge(step, calibration, self._calibration(seen.task, sums))
        return found + self._judge(step, flattening, self._flattening(flattening, sums, classes))

    def _sqnr(self, where: tuple[str, str], value: float) -> _Crossing:
        baseline = self._usual_sqnr(where)
        excess, limit = 0.0, self.limits.sqnr_floor_db
        if baseline is not None:
            excess = (baseline - value) / self.limits.sqnr_drop_db
            limit = max(baseline - self.limits.sqnr_drop_db, limit)
        if value < self.limits.sqnr_floor_db:
            excess = max(excess, 1.0 + (self.limits.sqnr_floor_db - value) / self.limits.sqnr_floor_db)
        return _Crossing(excess, value, limit, baseline, f"SQNR fell to {value:.1f} dB")

    def _usual_sqnr(self, where: tuple[str, str]) -> float | None:
        baseline = self._baseline((AlarmKind.SQNR, *where))
        return None if baseline is None else min(baseline, self.limits.sqnr_usual_db)

    def _gemm(self, where: tuple[str, str], value: float) -> _Crossing:
        """As `_sqnr`, without the floor: a product of canceling terms has a low SQNR in health too."""
        baseline = self._usual_sqnr(where)
        if baseline is None:
            return _Crossing(0.0, value, math.nan, None, "")
        drop = 2 * self.limits.sqnr_drop_db
        excess = (baseline - value) / drop
        return _Crossing(excess, value, baseline - drop, baseline, f"SQNR against BF16 fell to {value:.1f} dB")

    def _share(self, kind: AlarmKind, where: tuple[str, str], value: float) -> _Crossing:
        growth = getattr(self.limits, f"{kind.value}_growth")
        ceiling = getattr(self.limits, f"{kind.value}_limit")
        if kind is AlarmKind.UNDERFLOW and where[1] == "probs":
            ceiling, growth = math.inf, 2 * growth
        baseline = self._baseline((kind, *where))
        excess = 0.0 if baseline is None else (value - baseline) / growth
        if value > ceiling:
            excess = max(excess, value / ceiling)
        limit = ceiling if baseline is None else min(baseline + growth, ceiling)
        verb = "underflow to zero" if kind is AlarmKind.UNDERFLOW else "saturate"
        return _Crossing(excess, value, limit, baseline, f"{value:.1%} of its elements {verb}")

    def _outlier(self, subject: Subject, exponent: int, amax: float) -> _Crossing:
        baseline = self._baseline(subject)
        if baseline is None:
            return _Crossing(0.0, float(exponent), math.nan, None, "")
        grown = exponent - baseline
        growth = self.limits.outlier_growth * (1.5 if subject[2].startswith("grad") else 1.0)
        text = f"its amax is {amax:.3g}, 2^{grown:.0f} times what it was: scale exponent {exponent}"
        return _Crossing(grown / growth, float(exponent), baseline + growth, baseline, text)

    def _calibration(self, task: str, s: dict[str, float]) -> _Crossing:
        drift = self.limits.calibration_drift
        ratio = s["mxfp8_predicted"] / s["shadow_predicted"] if s["shadow_predicted"] > 0 else 1.0
        text = f"it predicts {ratio:.3f} times the positives its BF16 shadow predicts"
        paired = _Crossing(abs(ratio - 1) / drift, ratio, 1 + math.copysign(drift, ratio - 1), 1.0, text)
        if s["mxfp8_positives"] <= 0 or s["mxfp8_predicted"] <= 0:
            return paired
        calibration = s["mxfp8_predicted"] / s["mxfp8_positives"]
        off = abs(math.log(calibration))
        sigma = math.sqrt(max(s["mxfp8_variance"], 1e-12)) / s["mxfp8_positives"]
        if self.reports[task] < self.limits.settling:
            return paired
        best = self.best_calibration[task] = min(self.best_calibration.get(task, off), off)
        if abs(calibration - 1) < self.limits.calibration_sigmas * sigma:
            return paired
        text = f"its calibration against the labels drifted to {calibration:.3f}"
        limit = math.exp(math.copysign(best + 2 * drift, math.log(calibration)))
        labeled = _Crossing((off - best) / (2 * drift), calibration, limit, math.exp(best), text)
        return max(paired, labeled, key=lambda crossing: crossing.excess)

    def _flattening(self, subject: Subject, s: dict[str, float], classes: int) -> _Crossing:
        mxfp8, shadow = _information(s, "mxfp8", classes), _information(s, "shadow", classes)
        settled = self.reports[subject[1]] >= self.limits.settling and s["rows"] >= self.limits.settling_rows
        reference = max(shadow, (self._baseline(subject) or 0.0) if settled else 0.0)
        if reference < 0.02:  # predictions that never told rows apart have nothing to lose
            return _Crossing(0.0, mxfp8, 0.0, reference, "")
        lost = 1 - mxfp8 / reference
        text = f"its predictions flatten: {lost:.0%} of what they told about a row is gone"
        limit = reference * (1 - self.limits.flattening)
        return _Crossing(lost / self.limits.flattening, mxfp8, limit, reference, text)

    def _baseline(self, subject: Subject) -> float | None:
        watch = self.watches.get(subject)
        return median(watch.history) if watch is not None and len(watch.history) >= 3 else None

    def _judge(self, step: int, subject: Subject, now: _Crossing, patience: int | None = None) -> list[Alarm]:
        """The hysteresis: what a figure now means for its watch."""
        watch = self.watches.setdefault(subject, _Watch(deque(maxlen=self.limits.baseline)))
        if not watch.active:
            if now.excess < 1:
                watch.beyond = 0
                watch.history.append(now.value)
                return []
            watch.beyond += 1
            if watch.beyond < (patience or self.limits.patience):
                return []
            watch.active = True
            return [_alarm(step, subject, now, cleared=False)]
        watch.beyond = watch.beyond + 1 if now.excess >= 0.5 else 0
        if watch.beyond:
            return []
        watch.active = False
        return [_alarm(step, subject, now, cleared=True)]


def _information(s: dict[str, float], side: str, classes: int) -> float:
    """1 - mean entropy of the predictions over the entropy of their mean; 0 where they are all alike."""
    weight = s["weight"]
    if weight <= 0:
        return 0.0
    if classes:
        return 1 - (s[f"{side}_entropy"] / weight) / math.log(max(classes, 2))
    mean = min(max(s[f"{side}_predicted"] / weight, 1e-12), 1 - 1e-12)
    most = -(mean * math.log(mean) + (1 - mean) * math.log1p(-mean))
    return 1 - (s[f"{side}_entropy"] / weight) / most


_REMEDIES = {
    AlarmKind.NONFINITE: "look for an outlier upstream, or override the layer with 'bf16'",
    AlarmKind.DEAD: "nothing is learned through it; look at what feeds it",
    AlarmKind.SQNR: "override the layer with 'bf16', or choose 1x32 tiles for it",
    AlarmKind.UNDERFLOW: "an outlier in its blocks sets their scale; override the layer with 'bf16', or use 1x32 tiles",
    AlarmKind.OUTLIER: "look at what feeds it before it overflows; clip it, or override the layer with 'bf16'",
    AlarmKind.SATURATION: "use scale_rounding 'rceil', or override the layer with 'bf16'",
    AlarmKind.CALIBRATION: "compare the layers' SQNR and leave the worst, or the heads, in BF16",
    AlarmKind.FLATTENING: "compare the layers' SQNR and leave the worst, or attention, in BF16",
}


def _alarm(step: int, subject: Subject, now: _Crossing, cleared: bool) -> Alarm:
    kind, layer, tensor = subject
    place = f"{layer or '(root)'}: {tensor}"
    if cleared:
        message = f"step {step}: {place}: {kind.value} alarm cleared at {now.value:.4g}"
    else:
        was = "" if now.baseline is None else f", was {now.baseline:.4g}"
        limit = f" (limit {now.limit:.4g}{was})" if math.isfinite(now.limit) and now.limit else ""
        message = f"step {step}: {place}: {now.text}{limit}; {_REMEDIES[kind]}"
    return Alarm(
        kind=kind,
        layer=layer,
        tensor=tensor,
        step=step,
        value=now.value,
        limit=now.limit,
        baseline=now.baseline,
        cleared=cleared,
        message=message,
    )
