"""The functional API of jagged attention: errors, fakes, compiling, checkpointing, autocast, FLOPs."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from mxfp8_recipe.autograd import AttentionConfig
from mxfp8_recipe.backends import jagged as ops
from mxfp8_recipe.backends.offsets import WATCH
from mxfp8_recipe.functional import (
    JaggedBias,
    block_attention,
    check_offsets,
    generalized_attention,
    jagged_attention,
    jagged_schedule,
    log_time_bounds,
)
from mxfp8_recipe.fused.attention import jagged_reference as reference
from numerics_tests.attention_oracle import config, precision
from numerics_tests.helpers import environment_of_tests, same_bits
from numerics_tests.jagged_cases import JaggedCase, JaggedTensors, offsets_of, tensors

CASE = JaggedCase(name="", q_lengths=(33, 0, 5, 40), k_lengths=(7, 12, 0, 64), heads=4, groups=2)
SELF = JaggedCase(name="", q_lengths=(33, 0, 5, 70), k_lengths=(33, 0, 5, 70), heads=4, groups=2)
GELU: dict[str, Any] = {"activation": "gelu", "pre_scale": 0.2, "post_scale": 0.5}
MX = config()
STOCHASTIC = config(pv={"probs": {"rounding": "stochastic"}}, dk={"query": {"rounding": "stochastic"}})


def bias_for(t: JaggedTensors, rows: int | None = None) -> JaggedBias:
    heads, rows = t.q.shape[1], len(t.q) if rows is None else rows
    return JaggedBias(
        position=torch.randn(9, heads).requires_grad_(),
        time=torch.randn(6, heads).requires_grad_(),
        q_times=torch.randint(0, 10**6, (rows,)),
        k_times=torch.randint(0, 10**6, (len(t.k),)),
        time_bounds=log_time_bounds(6, width=2.0),
    )


def softmax(t: JaggedTensors, chosen: AttentionConfig | None = None, bias: Any = None, **kwargs: Any) -> Tensor:
    return jagged_attention(t.q, t.k, t.v, *t.layout, bias=bias, config=chosen, **kwargs)


def gelu(t: JaggedTensors, chosen: AttentionConfig | None = None, bias: Any = None, **kwargs: Any) -> Tensor:
    return generalized_attention(t.q, t.k, t.v, *t.layout, bias=bias, config=chosen, **(GELU | kwargs))


def block(t: JaggedTensors, chosen: AttentionConfig | None = None, bias: Any = None, **kwargs: Any) -> Tensor:
    return block_attention(t.q, t.k, t.v, t.q_offsets, t.max_q, config=chosen, **kwargs)


FAMILIES: dict[str, Callable[..., Tensor]] = {"softmax": softmax, "gelu": gelu, "block": block}


def leaves(t: JaggedTensors) -> list[Tensor]:
    return [x.requires_grad_() for x in (t.q, t.k, t.v)]


def test_the_api_is_the_reference() -> None:
    t = tensors(CASE)
    bias = bias_for(t)
    wanted = [*leaves(t), bias.position, bias.time]
    out = softmax(t, bias=bias, causal=True, window=20, scale=0.3)
    grads = torch.autograd.grad(out, wanted, t.grad_out)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        options: dict[str, Any] = {"scale": 0.3, "causal": True, "window": 20}
        expected, lse = reference.jagged_forward(t.q, t.k, t.v, *t.layout, bias, **options)
        theirs = reference.jagged_backward(t.grad_out, t.q, t.k, t.v, expected, lse, *t.layout, bias, **options)
    assert all(map(same_bits, (out, *grads), (expected, *theirs)))
    out = gelu(t, bias=bias)
    grads = torch.autograd.grad(out, wanted, t.grad_out)  # pyright: ignore[reportArgumentType]
    with torch.no_grad():
        expected = reference.generalized_forward(t.q, t.k, t.v, *t.layout, bias, **GELU)
        theirs = reference.generalized_backward(t.grad_out, t.q, t.k, t.v, *t.layout, bias, **GELU)
    assert all(map(same_bits, (out, *grads), (expected, *theirs)))
    assert jagged_schedule(t.q_offsets, t.k_offsets, t.max_q, t.max_k, total_q=len(t.q), total_k=len(t.k)).numel() == 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chosen", [None, MX], ids=["high", "mxfp8"])
def test_every_subset_of_gradients(family: str, chosen: AttentionConfig | None) -> None:
    """Computed alone or with others, a gradient has the same bits; one not asked for is not there."""
    t = tensors(SELF)
    bias = None if family == "block" else bias_for(t)
    inputs = [t.q, t.k, t.v, *([] if bias is None else [bias.position, bias.time])]
    full: list[Any] = []
    for subset in list(itertools.product([True, False], repeat=len(inputs)))[:-1]:
        for x, on in zip(inputs, subset):
            x.grad = None
            x.requires_grad_(on)
        FAMILIES[family](t, chosen, bias).backward(t.grad_out)
        full = full or [x.grad for x in inputs]
        for x, on, expected in zip(inputs, subset, full):
            assert (x.grad is not None) == on
            assert x.grad is None or same_bits(x.grad, expected)


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("decreasing", {"q_offsets": torch.tensor([0, 50, 40, 60, 78])}, ValueError, "q_offsets: got 50 before 40 at 1"),
    ("not from 0", {"k_offsets": torch.tensor([1, 7, 19, 19, 83])}, ValueError, "k_offsets: got 1 first, expected 0"),
    ("wrong total", {"k_offsets": torch.tensor([0, 7, 19, 19, 80])}, ValueError, "k_offsets: got 80 last, expected 83"),
    ("max_q", {"max_q": 39}, ValueError, "q_offsets: sample 3 has length 40, more than the declared maximum 39"),
    ("max_k", {"max_k": 63}, ValueError, "k_offsets: sample 3 has length 64, more than the declared maximum 63"),
    ("dtype", {"q_offsets": torch.tensor([0.0, 33, 33, 38, 78])}, TypeError, "q_offsets: got torch.float32"),
    ("shape", {"k_offsets": torch.zeros(2, 5, dtype=torch.int32)}, ValueError, r"k_offsets: got \(2, 5\)"),
    ("none", {"q_offsets": torch.zeros(0, dtype=torch.int32)}, ValueError, r"q_offsets: got \(0,\)"),
    ("no sample", {"k_offsets": torch.zeros(1, dtype=torch.int32)}, ValueError, "got offsets of no sample"),
    ("list", {"k_offsets": [0, 7, 19, 19, 83]}, ValueError, "k_offsets: got list"),
    ("samples", {"k_offsets": torch.tensor([0, 19, 83])}, ValueError, "'q_offsets': 4, 'k_offsets': 2"),
    ("device", {"q_offsets": torch.empty(5, dtype=torch.int32, device="meta")}, ValueError, "q_offsets: got meta"),
    ("tensor max", {"max_q": torch.tensor(40)}, TypeError, "the maximum length of q_offsets is a tensor"),
    ("negative max", {"max_k": -1}, ValueError, "the maximum length of k_offsets: got -1"),
    ("head dims", {"k": torch.randn(83, 2, 16)}, ValueError, r"expected \(Tq, H, D\), \(Tk, G, D\)"),
    ("value rows", {"v": torch.randn(82, 2, 32)}, ValueError, r"expected \(Tq, H, D\), \(Tk, G, D\)"),
    ("heads", {"k": torch.randn(83, 3, 32), "v": torch.randn(83, 3, 32)}, ValueError, "got 4 heads of q and 3 of k"),
    ("dims", {"q": torch.randn(1, 78, 4, 32)}, ValueError, "tokens of all samples one after another"),
    ("dtypes", {"k": torch.randn(83, 2, 32).bfloat16()}, TypeError, "got float32, bfloat16, float32"),
    ("half", {"q": torch.zeros(78, 4, 32, dtype=torch.int8)}, TypeError, "got int8"),
    ("window", {"window": -1}, ValueError, "window: got -1"),
    ("window", {"window": 1.5}, ValueError, "window: got 1.5"),
    ("bias", {"bias": torch.randn(3, 4)}, TypeError, "bias: got Tensor"),
    ("table", {"bias": JaggedBias(position=torch.randn(9, 2))}, ValueError, r"bias.position: got \(9, 2\)"),
    ("table dtype", {"bias": JaggedBias(time=torch.randn(9, 4).half())}, TypeError, "bias.time: got torch.float16"),
    ("no times", {"bias": JaggedBias(time=torch.randn(9, 4))}, ValueError, r"bias.q_times: got None, expected \(78,\)"),
    ("cpu", {"cpu_offsets": (torch.tensor([0, 78, 78, 78, 78]),) * 2}, ValueError,
     "sample 0 has length 78"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "message"), [x[1:] for x in BAD], ids=[x[0] for x in BAD])
def test_what_does_not_fit_is_an_error(change: dict[str, Any], error: type[Exception], message: str) -> None:
    """Each for softmax attention; where generalized attention takes the same argument, for it too."""
    t = tensors(CASE)
    given = dict(zip(("q", "k", "v", "q_offsets", "k_offsets", "max_q", "max_k"), (t.q, t.k, t.v, *t.layout)))
    with pytest.raises(error, match=f"^jagged_attention: .*{message}"):
        jagged_attention(**(given | change))
    with pytest.raises(error, match=f"^generalized_attention: .*{message}"):
        generalized_attention(**(given | change), **GELU)
    jagged_attention(**given)


def test_errors_of_each_family_name_the_layer() -> None:
    t = tensors(SELF)
    named = AttentionConfig.of(precision(), layer="tower.pool")
    with pytest.raises(ValueError, match=r"^tower\.pool: window: got -1"):
        softmax(t, named, window=-1)
    with pytest.raises(ValueError, match=r"activation: got 'gellu' \(did you mean 'gelu'"):
        gelu(t, activation="gellu")
    with pytest.raises(ValueError, match="q_offsets: expected None with broadcast_q=True"):
        gelu(t, broadcast_q=True)
    with pytest.raises(ValueError, match="block: got 0"):
        block(t, block=0)
    with pytest.raises(ValueError, match="block_attention: offsets: sample 3 has length 70"):
        block_attention(t.q, t.k, t.v, t.q_offsets, 69)
    with pytest.raises(ValueError, match="expected as many: self-attention"):
        block_attention(t.q, t.k[:-1], t.v[:-1], t.q_offsets, 70)
    with pytest.raises(ValueError, match="check_offsets: offsets: got 108 last, expected 109"):
        check_offsets(t.q_offsets, 109, 70)


def test_one_tensor_may_be_queries_keys_and_values() -> None:
    x = tensors(JaggedCase(name="", q_lengths=(5, 9), k_lengths=(5, 9))).q.requires_grad_()
    offsets = offsets_of((5, 9))
    for run in (
        lambda a, b, c: jagged_attention(a, b, c, offsets, offsets, 9, 9, config=MX),
        lambda a, b, c: generalized_attention(a, b, c, offsets, offsets, 9, 9, config=MX, **GELU),
        lambda a, b, c: block_attention(a, b, c, offsets, 9, config=MX),
    ):
        out = torch.compile(run, backend="aot_eager", fullgraph=True)(x, x, x)
        expected = run(x, x.clone(), x.clone())
        assert same_bits(out, expected)
        assert same_bits(*(torch.autograd.grad(y.sum(), x)[0] for y in (out, expected)))


def test_offsets_are_looked_at_again_after_they_change() -> None:
    t = tensors(SELF)
    softmax(t)
    t.q_offsets[1] = 1000
    with pytest.raises(ValueError, match="got 1000 before 33 at 1"):
        softmax(t)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chosen", [None, MX], ids=["high", "mxfp8"])
def test_the_ops_keep_torchs_rules(family: str, chosen: AttentionConfig | None) -> None:
    """Schema, fake shapes and strides, autograd registration, and tracing with dynamic shapes."""
    t = tensors(SELF)
    seen: list[tuple[Any, tuple[Any, ...]]] = []

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace == "mxfp8_recipe":
                seen.append((func, args))
            return func(*args, **(kwargs or {}))

    leaves(t)
    with Record():
        FAMILIES[family](t, chosen, None if family == "block" else bias_for(t)).backward(t.grad_out)
    assert len({func for func, _ in seen}) == (2 if chosen is None else 3) + (chosen is None and family != "block")
    for func, args in seen:
        detached = torch.utils._pytree.tree_map_only(Tensor, lambda x: x.detach(), args)
        torch.library.opcheck(func, detached, test_utils=("test_schema", "test_faketensor"))


LENGTHS = [(33, 0, 5, 40), (12, 30, 1, 1), (64, 2, 3, 9, 10), (7, 7, 40), (50, 60)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chosen", [None, MX], ids=["high", "mxfp8"])
def test_one_graph_for_all_lengths(family: str, chosen: AttentionConfig | None) -> None:
    """Compiled once with static and once with dynamic shapes, and then no more; with the bits of eager, both ways."""
    torch.compiler.reset()
    graphs = 0

    def count(module: Any, example_inputs: Any) -> Any:
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(module, example_inputs)

    def layer(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, position: Tensor) -> Tensor:
        options: dict[str, Any] = {"config": chosen}
        if family == "block":
            return block_attention(q, k, v, offsets, 64, **options) * 2
        options["bias"] = JaggedBias(position=position)
        if family == "gelu":
            return generalized_attention(q, k, v, offsets, offsets, 64, 64, **GELU, **options) * 2
        return jagged_attention(q, k, v, offsets, offsets, 64, 64, causal=True, **options) * 2

    compiled = torch.compile(layer, backend=count, fullgraph=True)
    position = torch.randn(9, 4, requires_grad=True)
    counts = []
    for lengths in LENGTHS:
        t = tensors(JaggedCase(name="", q_lengths=lengths, k_lengths=lengths, heads=4, groups=2))
        inputs = (*leaves(t), t.q_offsets, position)
        wanted = (t.q, t.k, t.v) if family == "block" else (t.q, t.k, t.v, position)
        results = []
        for run in (compiled, layer):
            out = run(*inputs)
            results.append([out, *torch.autograd.grad(out, wanted, t.grad_out)])
        assert all(map(same_bits, *results))
        counts.append(graphs)
    assert counts[1] <= 2
    assert counts[-1] == counts[2], counts
    torch.compiler.reset()


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_checkpointing_recomputes_the_same_bits(family: str, use_reentrant: bool) -> None:
    """Stochastic rounding included: both kinds restore torch's generator."""
    t = tensors(SELF)
    inputs = leaves(t)
    results = []
    for wrapped in (False, True):

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            part = JaggedTensors(q, k, v, t.grad_out, *t.layout)
            return FAMILIES[family](part, STOCHASTIC)

        torch.manual_seed(3)
        for x in inputs:
            x.grad = None
        out: Any = checkpoint(run, *inputs, use_reentrant=use_reentrant) if wrapped else run(*inputs)
        out.backward(t.grad_out)
        results.append([out.detach(), *(x.grad for x in inputs)])
    assert all(map(same_bits, *results))
    assert not same_bits(results[0][0], FAMILIES[family](t, STOCHASTIC))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("chosen", [None, MX], ids=["high", "mxfp8"])
def test_autocast_computes_in_its_dtype(family: str, chosen: AttentionConfig | None) -> None:
    t, half = tensors(SELF), tensors(SELF, dtype=torch.bfloat16)
    inputs = leaves(t)
    with torch.autocast("cpu", torch.bfloat16):
        out = FAMILIES[family](t, chosen)
    assert same_bits(out, FAMILIES[family](half, chosen))
    grads = torch.autograd.grad(out, inputs, t.grad_out.bfloat16())
    assert all(g.dtype is torch.float32 for g in grads)


@pytest.mark.parametrize("family", FAMILIES)
def test_second_derivatives_are_refused(family: str) -> None:
    t = tensors(SELF)
    leaves(t)
    with pytest.raises(RuntimeError, match="no second derivatives"):
        torch.autograd.grad(FAMILIES[family](t).sum(), t.q, create_graph=True)


def test_without_gradients_nothing_is_quantized_for_backward() -> None:
    t = tensors(SELF)
    leaves(t)

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.mxfp8_recipe.quantize_jagged.default:
                Count.made += sum(bool(text) for text in args[3:5])
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Count():
        softmax(t, MX)
    assert Count.made == 3
    with Count():
        softmax(t, MX)
    assert Count.made == 3 + 6


def counted(run: Callable[[], Tensor], grad: Tensor | None = None) -> int:
    with FlopCounterMode(display=False) as counter:
        out = run()
        if grad is not None:
            out.backward(grad)
    return counter.get_total_flops()


@pytest.mark.parametrize("chosen", [None, MX], ids=["high", "mxfp8"])
def test_flops(chosen: AttentionConfig | None) -> None:
    """4 H D sum(Lq Lk) forward, 2.5 times that backward; whether or not GEMMs are MXFP8."""
    t, own = tensors(CASE), tensors(SELF)
    leaves(t)
    leaves(own)
    forward = 4 * 4 * 32 * (33 * 7 + 40 * 64)
    for run in (softmax, gelu):
        assert counted(lambda run=run: run(t, chosen)) == forward
        assert counted(lambda run=run: run(t, chosen), t.grad_out) == forward * 7 // 2
    blocks = 4 * 4 * 32 * (33**2 + 5**2 + 64**2 + 6**2)
    assert counted(lambda: block(own, chosen), own.grad_out) == blocks * 7 // 2
    args: dict[str, Any] = {"broadcast_q": True, "config": chosen, **GELU}
    layout = (None, own.k_offsets, 0, own.max_k)
    assert counted(lambda: generalized_attention(own.q[:3], own.k, own.v, *layout, **args)) == 4 * 4 * 32 * 3 * 108


def test_flops_of_fake_tensors_are_those_of_equal_lengths() -> None:
    t = tensors(SELF)
    with FakeTensorMode() as mode:
        fake = JaggedTensors(*(mode.from_tensor(x) for x in list(vars(t).values())[:6]), t.max_q, t.max_k)
        assert counted(lambda: softmax(fake)) == 4 * 4 * 32 * (108 * 108 // 4)
        assert counted(lambda: block(fake)) == 4 * 4 * 32 * 108 * 64


def test_offsets_of_both_integer_types_and_of_inference_mode() -> None:
    t, wide = tensors(SELF), tensors(SELF, offsets_dtype=torch.int64)
    assert same_bits(softmax(t), softmax(wide))
    with torch.inference_mode():
        assert same_bits(softmax(tensors(SELF)), softmax(t))


def test_a_traced_schedule_has_the_shape_of_a_built_one(monkeypatch: pytest.MonkeyPatch) -> None:
    schedule = pytest.importorskip("mxfp8_recipe.fused.attention.schedule")
    monkeypatch.setattr(ops, "select", lambda device: "hopper")
    for lengths in ((), (0, 0), (1,), (33, 0, 5, 40), (300, 129, 1), (1,) * 200):
        offsets, total = offsets_of(lengths), sum(lengths)
        for q_offsets in (offsets, None):
            args = (q_offsets, offsets, total, total, 300, 300)
            built = schedule.build(*args)
            assert ops._schedule_fake(*args, False, None, "auto").shape == built.shape
            if q_offsets is not None:
                found = jagged_schedule(offsets, offsets, 300, 300, total_q=total, total_k=total)
                assert torch.equal(found, built)


def test_the_ops_run_on_the_kernels() -> None:
    script = Path(__file__).with_name("jagged_on_kernels.py")
    command = [sys.executable, str(script), "jagged", "block", "generalized", "pooled"]
    environment = environment_of_tests(OMP_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
def test_bad_offsets_on_a_gpu_are_raised_by_a_later_call_without_waiting() -> None:
    t = tensors(SELF, dtype=torch.bfloat16, device="cuda")
    softmax(t)
    torch.cuda.synchronize()
    WATCH.poll()
    bad = offsets_of((30, 0, 5, 73), "cuda")
    assert bad[-1] == len(t.q)
    torch.cuda.set_sync_debug_mode("error")
    try:
        jagged_attention(t.q, t.k, t.v, bad, bad, t.max_q, t.max_k)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    with pytest.raises(ValueError, match=r"jagged_attention: q_offsets: sample 3 has length 73.*an earlier call"):
        softmax(t)
    softmax(t)


@pytest.mark.gpu
def test_a_cpu_copy_is_checked_at_once() -> None:
    t = tensors(SELF, dtype=torch.bfloat16, device="cuda")
    copy = t.q_offsets.cpu()
    softmax(t, cpu_offsets=(copy, copy))
    with pytest.raises(ValueError, match="q_offsets: sample 3 has length 70"):
        jagged_attention(t.q, t.k, t.v, t.q_offsets, t.k_offsets, 69, 70, cpu_offsets=(copy, copy))


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_compiled_kernels_have_the_bits_of_eager_ones(family: str) -> None:
    """Their schedule is traced with its shape alone; one layer's schedule serves another."""
    torch.compiler.reset()

    def layer(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor) -> Tensor:
        if family == "block":
            return block_attention(q, k, v, offsets, 64)
        if family == "gelu":
            return generalized_attention(q, k, v, offsets, offsets, 64, 64, **GELU)
        return jagged_attention(q, k, v, offsets, offsets, 64, 64, causal=True)

    compiled = torch.compile(layer, fullgraph=True)
    for lengths in LENGTHS[:3]:
        case = JaggedCase(name="", q_lengths=lengths, k_lengths=lengths, heads=4, groups=2)
        t = tensors(case, dtype=torch.bfloat16, device="cuda")
        inputs = leaves(t)
        results = []
        for run in (compiled, layer):
            out = run(*inputs, t.q_offsets)
            results.append([out, *torch.autograd.grad(out, inputs, t.grad_out)])
        assert all(map(same_bits, *results))
    if family == "softmax":
        options: dict[str, Any] = {"causal": True}
        shared = jagged_schedule(*t.layout, total_q=len(t.q), total_k=len(t.k), **options)
        assert shared.numel()
        assert same_bits(softmax(t, schedule=shared, **options), softmax(t, **options))
    torch.compiler.reset()
