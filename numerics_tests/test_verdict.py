"""The verdict rule: it must not cry wolf, must not sleep, and must say what it cannot know."""

import dataclasses
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mxfp8_recipe.monitors.records import GradientAgreement, LayerAgreement, SameWeights, SegmentShift, TaskAgreement
from mxfp8_recipe.monitors.student_t import quantile
from mxfp8_recipe.monitors.verdict import Evidence, Outcome, TaskGaps, decide, power, seed_interval

LEVEL_3 = 1 - 0.05 * (1 - 1 / 3)  # what a first look at three seeds may spend

BUDGET = 0.001


def same_weights(
    seed: int = 0, *, grad: float = 0.04, layer_grad: float = 0.04, segments: tuple = (), **changes
) -> SameWeights:
    task = {
        "task": "ctr",
        "rows": 1000,
        "logit_rms": 0.01,
        "logit_mean": 0.0005,
        "logit_mean_error": 0.0003,
        "logit_max": 0.05,
        "calibration": 0.0004,
        "cross_entropy": 1e-5,
        "cross_entropy_error": 1e-5,
        "bf16_logit_rms": 0.001,
        "bf16_logit_mean": 0.0001,
        "segments": segments,
    }
    layer = LayerAgreement(layer="top.0", quantized=True, sqnr_db=28.0, gradient=gradient(layer_grad))
    return SameWeights(seed=seed, tasks=(TaskAgreement(**task | changes),), layers=(layer,), gradient=gradient(grad))


def gradient(error: float) -> GradientAgreement:
    return GradientAgreement(cosine=0.999, error=error, bf16_error=0.004)


def evidence(mxfp8, placebos=None, *, measured=None, **changes) -> Evidence:
    gaps = TaskGaps(task="ctr", mxfp8=tuple(mxfp8), placebos=placebos or {})
    measured = measured or tuple(same_weights(seed) for seed in range(len(mxfp8)))
    return Evidence(**{"gaps": (gaps,), "same_weights": measured, "rows": 100_000} | changes)


def noisy(rng: random.Random, seeds: int, spread: float, harm: float = 0.0) -> Evidence:
    """Gaps of twins that share their BF16 run, as the arms do; `spread` is the drift of one run."""
    base = [rng.gauss(0, spread) for _ in range(seeds)]
    gaps = {
        name: tuple(rng.gauss(shift, spread) - b for b in base)
        for name, shift in (("mxfp8", harm), ("fp32", 0.0), ("bf16_init_noise", 0.0))
    }
    return evidence(gaps.pop("mxfp8"), gaps)


def test_interval_by_hand():
    own = seed_interval(TaskGaps(task="ctr", mxfp8=(0.001, 0.002, 0.003)))
    half = quantile(LEVEL_3, 2) * 0.001 / math.sqrt(3)
    assert own.mean == pytest.approx(0.002)
    assert own.high - own.mean == pytest.approx(half)
    quiet = TaskGaps(task="ctr", mxfp8=(0.002, 0.002, 0.002), placebos={"fp32": (0.001, -0.001, 0.001)})
    assert seed_interval(quiet).high - 0.002 == pytest.approx(quantile(LEVEL_3, 3) * 0.001 / math.sqrt(3))
    two = TaskGaps(task="ctr", mxfp8=(0.002,) * 3, placebos={"a": (0.001, -0.001, 0.001), "b": (-0.002, 0, 0.002)})
    spread = math.sqrt((3 * 0.001**2 + 2 * 0.002**2) / 6)
    assert seed_interval(two).high - 0.002 == pytest.approx(quantile(LEVEL_3, 6 / 1.25) * spread / math.sqrt(3))


def test_pass_inside_the_budget():
    decision = decide(evidence([1e-5, -1e-5, 2e-5], {"fp32": (1e-5, -2e-5, 1e-5)}), budget=BUDGET)
    assert decision.outcome is Outcome.PASS
    assert "inside the budget of ±0.100%" in decision.reasons[0]
    assert decision.undecided == ()


@given(
    harm=st.floats(5, 1000),
    seeds=st.integers(2, 8),
    spread=st.floats(0, 0.2),
    sign=st.sampled_from([-1, 1]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_a_harm_of_many_budgets_fails(harm, seeds, spread, sign, seed):
    rng = random.Random(seed)
    gaps = [sign * harm * BUDGET * (1 + spread * rng.uniform(-1, 1) / 10) for _ in range(seeds)]
    placebos = {"fp32": tuple(rng.uniform(-1, 1) * spread * BUDGET for _ in gaps)}
    decision = decide(evidence(gaps, placebos), budget=BUDGET)
    assert decision.outcome is Outcome.FAIL
    assert "outside the budget" in decision.reasons[0]


@given(gap=st.floats(-1, 1), placebo=st.floats(-1, 1))
@settings(max_examples=50, deadline=None)
def test_one_seed_is_at_most_inconclusive(gap, placebo):
    decision = decide(evidence([gap], {"fp32": (placebo,), "bf16_init_noise": (0.0,)}), budget=BUDGET)
    assert decision.outcome is Outcome.INCONCLUSIVE
    assert "one seed" in decision.reasons[0]
    assert decision.power.ne_resolvable is None


def test_one_seed_fails_where_a_gate_breaks():
    assert decide(evidence([0.0], measured=(same_weights(logit_mean=-0.0021),))).outcome is Outcome.FAIL


@given(mean=st.floats(-0.01, 0.01), seeds=st.integers(1, 6), values=st.lists(st.floats(-0.01, 0.01), min_size=6))
@settings(max_examples=100, deadline=None)
def test_a_wider_budget_never_turns_pass_into_anything_else(mean, seeds, values):
    order = [Outcome.FAIL, Outcome.INCONCLUSIVE, Outcome.PASS]
    measured = evidence([mean + v for v in values[:seeds]], {"fp32": tuple(values[:seeds])})
    ranks = [order.index(decide(measured, budget=b).outcome) for b in (1e-4, 1e-3, 1e-2, 1e-1)]
    assert ranks == sorted(ranks)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"logit_rms": 0.031}, "logit RMS error"),
        ({"logit_mean": 0.0021}, "mean logit error"),
        ({"logit_mean": math.nan}, "mean logit error"),
        ({"logit_rms": math.nan}, "logit RMS error"),
        ({"calibration": -0.0021}, "calibration change"),
        ({"cross_entropy": -0.0013, "cross_entropy_error": 1e-4}, "cross entropy change"),
        ({"cross_entropy": math.nan}, "cross entropy change"),
        ({"grad": 0.065}, "gradient error over BF16's own"),
        ({"grad": math.nan}, "gradient error over BF16's own"),
        ({"layer_grad": 0.13}, "gradient error of a layer over BF16's own"),
        ({"segments": (SegmentShift(segment=3, rows=900, mean=0.003, error=4e-4),)}, "mean logit error of a segment"),
    ],
)
def test_each_gate_can_break_alone_and_decides_at_its_worst_seed(changes, name):
    measured = (same_weights(0), same_weights(1, **changes), same_weights(2))
    decision = decide(evidence([0.0, 1e-6, -1e-6], measured=measured), budget=BUDGET)
    assert decision.outcome is Outcome.FAIL
    broken = [gate for gate in decision.gates if not gate.holds]
    assert [gate.name.removeprefix("ctr: ") for gate in broken] == [name]
    assert "seed 1" in broken[0].detail
    assert decide(evidence([0.0, 1e-6, -1e-6]), budget=BUDGET).outcome is Outcome.PASS


def test_a_layer_is_not_judged_by_a_lucky_bf16_error():
    lucky = GradientAgreement(cosine=0.99, error=0.1, bf16_error=0.0001)
    measured = same_weights()
    layer = measured.layers[0].model_copy(update={"gradient": lucky})
    assert measured.layer_error_ratio(layer) == pytest.approx(0.1 / measured.gradient.bf16_error)
    assert lucky.error_ratio() == pytest.approx(0.1 * 2**9)


def test_every_task_must_pass():
    quiet = TaskGaps(task="ctr", mxfp8=(1e-6, -1e-6, 0.0))
    loud = TaskGaps(task="cvr", mxfp8=(0.01, -0.01, 0.0))
    harmed = TaskGaps(task="cvr", mxfp8=(0.01, 0.0101, 0.0099))
    measured = tuple(same_weights(s) for s in range(3))
    for second, expected in ((quiet, Outcome.PASS), (loud, Outcome.INCONCLUSIVE), (harmed, Outcome.FAIL)):
        decision = decide(Evidence(gaps=(quiet, second), same_weights=measured, rows=1000), budget=BUDGET)
        assert decision.outcome is expected
    assert decision.power.ne_resolvable == max(t.power.ne_resolvable for t in decision.tasks)


def test_identity_passes_with_one_seed_and_says_why():
    exact = same_weights(logit_rms=0.0, logit_mean=0.0, logit_max=0.0, calibration=0.0, grad=0.0)
    given_ = evidence([0.0], measured=(exact,), identical=True, identity=True, quantizes=False)
    decision = decide(given_)
    assert decision.outcome is Outcome.PASS
    assert "bitwise identical" in decision.reasons[0]


def test_a_recipe_that_did_nothing_does_not_pass():
    silent = decide(evidence([0.0, 0.0], identical=True, quantizes=True))
    assert silent.outcome is Outcome.INCONCLUSIVE
    assert "quantization did not happen" in silent.reasons[0]
    skipped = decide(evidence([0.0, 0.0], identical=True, quantizes=False))
    assert skipped.outcome is Outcome.INCONCLUSIVE
    assert "no layer" in skipped.reasons[0]


def test_interrupted_runs_are_inconclusive_unless_a_gate_broke():
    decision = decide(evidence([1e-6, 0.0], interrupted="stopped after 2 of 3 seeds"))
    assert (decision.outcome, decision.reasons) == (Outcome.INCONCLUSIVE, ("stopped after 2 of 3 seeds",))
    broken = evidence([0.0, 0.0], measured=(same_weights(logit_rms=0.1),), interrupted="stopped")
    assert decide(broken).outcome is Outcome.FAIL
    nothing = decide(Evidence(gaps=(TaskGaps(task="ctr", mxfp8=()),), same_weights=(), rows=10, interrupted="stopped"))
    assert nothing.outcome is Outcome.INCONCLUSIVE


def test_undefined_gaps_are_inconclusive():
    assert decide(evidence([math.nan, 0.0])).outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("budget", [0.0, -1.0, 1.0, math.nan])
def test_a_senseless_budget_is_an_error(budget):
    with pytest.raises(ValueError, match="budget"):
        decide(evidence([0.0]), budget=budget)


def test_power_names_seeds_and_rows_that_decide():
    gaps = TaskGaps(task="ctr", mxfp8=(0.001, -0.001, 0.0005), placebos={"fp32": (0.001, -0.0005, 0.001)})
    needed = power(gaps, budget=BUDGET, rows=1000)
    assert needed.ne_resolvable > BUDGET
    assert needed.rows_needed == math.ceil(1000 * (needed.ne_resolvable / BUDGET) ** 2)
    assert 3 < needed.seeds_needed < 100
    enough = power(gaps, budget=needed.ne_resolvable * 1.0001, rows=1000)
    assert enough.seeds_needed == 3
    assert enough.rows_needed <= 1000


def test_power_keeps_its_promise():
    """At the seeds it names, a harmless recipe passes in about 80 % of runs."""
    rng = random.Random(0)
    spread = 0.0008
    needed = []
    for _ in range(50):
        pilot = noisy(rng, 8, spread)
        needed.append(power(pilot.gaps[0], budget=BUDGET, rows=1).seeds_needed)
    seeds = sorted(needed)[25]
    runs = [dataclasses.replace(noisy(rng, seeds, spread), looks=(8,)) for _ in range(200)]
    passed = sum(decide(run, budget=BUDGET).outcome is Outcome.PASS for run in runs)
    assert 0.65 <= passed / 200 <= 0.95


@pytest.mark.parametrize("spread", [0.0001, 0.0005, 0.002])
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_it_neither_cries_wolf_nor_sleeps(seeds, spread):
    """Placebo against placebo fails in at most 5 % of runs; a harm of twice the budget passes in at most 5 %."""
    rng = random.Random(seeds)
    harmless = [decide(noisy(rng, seeds, spread), budget=BUDGET).outcome for _ in range(200)]
    harmful = [decide(noisy(rng, seeds, spread, 2 * BUDGET), budget=BUDGET).outcome for _ in range(200)]
    assert harmless.count(Outcome.FAIL) <= 10
    assert harmful.count(Outcome.PASS) <= 10
    if spread == 0.0001 and seeds == 5:
        assert harmless.count(Outcome.PASS) >= 190
        assert harmful.count(Outcome.FAIL) >= 190
