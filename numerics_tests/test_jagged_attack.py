"""Attention on jagged batches as users break it: odd batches against loops in float64, wrong arguments, odd states."""

from __future__ import annotations

import math
import random
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe
from mxfp8_recipe.autograd import AttentionConfig
from mxfp8_recipe.backends import jagged as ops
from mxfp8_recipe.backends import jagged_limits
from mxfp8_recipe.config import AttentionPrecision
from mxfp8_recipe.functional import (
    JaggedBias,
    block_attention,
    check_offsets,
    generalized_attention,
    jagged_attention,
    jagged_schedule,
    log_time_bounds,
)
from mxfp8_recipe.fused.attention.bias import table_gradient
from mxfp8_recipe.modules import (
    CrossAttention,
    HSTUAttention,
    JaggedAttention,
    JaggedMultiheadAttention,
    PooledAttention,
)
from numerics_tests.helpers import same_bits
from numerics_tests.jagged_cases import JaggedCase, offsets_of, tensors

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "relu": F.relu,
    "identity": lambda x: x,
}


def by_loops(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_cuts: list[int],
    k_cuts: list[int],
    bias: JaggedBias | None,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    activation: str = "",
    post_scale: float = 1.0,
) -> Tensor:
    """The definition in float64, sample by sample."""
    outputs = [q.new_empty(0, q.shape[1], v.shape[2]).double()]
    share = q.shape[1] // k.shape[1]
    for (q0, q1), (k0, k1) in zip(pairwise(q_cuts), pairwise(k_cuts)):
        keys, values = (x[k0:k1].double().repeat_interleave(share, 1) for x in (k, v))
        scores = torch.einsum("ihd,jhd->ijh", q[q0:q1].double(), keys) * scale
        apart = torch.arange(q1 - q0)[:, None] + (k1 - k0) - (q1 - q0) - torch.arange(k1 - k0)
        if bias is not None and bias.position is not None:
            rows = len(bias.position)
            scores = scores + bias.position.double()[(apart + rows // 2).clamp(0, rows - 1)]
        if bias is not None and bias.time is not None:
            assert bias.q_times is not None
            assert bias.k_times is not None
            assert bias.time_bounds is not None
            interval = (bias.q_times[q0:q1, None] - bias.k_times[k0:k1]).abs()
            scores = scores + bias.time.double()[(bias.time_bounds <= interval[..., None]).sum(-1)]
        seen = torch.ones_like(apart, dtype=torch.bool)
        seen &= (apart >= 0) | torch.tensor(not causal)
        seen &= apart.abs() <= min(2**40 if window is None else window, 2**40)
        if activation:
            weights = ACTIVATIONS[activation](scores) * seen[..., None] * post_scale
        else:
            some = seen.any(1)[:, None, None]
            weights = scores.masked_fill(~seen[..., None] & some, -math.inf).softmax(1) * some
        outputs.append(torch.einsum("ijh,jhe->ihe", weights, values))
    return torch.cat(outputs)


def strided(x: Tensor, kind: int) -> Tensor:
    """The values of x elsewhere: as they are, heads first, inside a larger tensor, with gaps."""
    if kind == 1:
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if kind == 2:
        return F.pad(x, (2, 3, 1, 0, 1, 2))[1 : 1 + len(x), 1:, 2:-3]
    return torch.stack((x, x), -1).flatten(-2)[..., ::2] if kind == 3 else x


def drawn_offsets(lengths: list[int], rng: random.Random) -> Tensor:
    """Of either integer type; at times a view with gaps, or of the end of another tensor."""
    offsets = offsets_of(tuple(lengths), dtype=rng.choice([torch.int32, torch.int64]))
    kind = rng.randrange(3)
    if kind == 0:
        return torch.stack((offsets, offsets + 7), 1).flatten()[::2]
    return torch.cat((offsets[:2] + 9, offsets))[-len(offsets) :] if kind == 1 else offsets


@pytest.mark.parametrize("family", ["softmax", "generalized", "pooled", "block"])
@pytest.mark.parametrize("seed", range(30))
def test_odd_batches_against_loops(family: str, seed: int) -> None:
    """Output and every gradient in fp32, largest error over largest value or 1. Measured over 900 batches: 2.3e-5."""
    rng = random.Random(seed)
    samples, lengths = rng.choice([0, 1, 1, 2, 4]), [0, 0, 1, 2, 5, 31, 32, 33, 65]
    q_lengths, k_lengths = ([rng.choice(lengths) for _ in range(samples)] for _ in range(2))
    if family == "block":
        k_lengths = q_lengths
    heads, groups = rng.choice([(1, 1), (2, 1), (3, 3), (4, 2)])
    dim, value_dim = rng.choice([1, 8, 16, 48, 80]), rng.choice([7, 16, 80])
    q_offsets, k_offsets = drawn_offsets(q_lengths, rng), drawn_offsets(k_lengths, rng)
    broadcast = family == "pooled"
    rows = rng.choice([1, 3]) if broadcast else sum(q_lengths)
    shapes = (rows, heads, dim), (sum(k_lengths), groups, dim), (sum(k_lengths), groups, value_dim)
    q, k, v = (strided(torch.randn(shape), rng.randrange(4)).requires_grad_() for shape in shapes)
    max_q, max_k = (max(x, default=0) + rng.choice([0, 1, 40]) for x in (q_lengths, k_lengths))
    out_rows = rows * samples if broadcast else rows
    position, buckets = rng.choice([0, 1, 2, 5, 8]), rng.choice([0, 1, 2, 6])
    bias = JaggedBias(
        position=torch.randn(position, heads).requires_grad_() if position else None,
        time=torch.randn(buckets, heads).requires_grad_() if buckets else None,
        q_times=torch.randint(-1000, 1000, (out_rows,)),
        k_times=torch.randint(-1000, 1000, (sum(k_lengths),)),
        time_bounds=log_time_bounds(max(buckets, 1), 1.2),
    )
    mask: dict[str, Any] = {"causal": rng.random() < 0.4, "window": rng.choice([None, None, 0, 1, 7, 2**31 - 1, 2**70])}
    scale, activation = rng.choice([0.3, -0.2]), rng.choice(list(ACTIVATIONS))
    q_cuts, k_cuts = q_offsets.tolist(), k_offsets.tolist()
    if family == "softmax":
        layout = (q_offsets, k_offsets, max_q, max_k)
        out = jagged_attention(q, k, v, *layout, bias=bias, scale=scale, **mask)
        expected = by_loops(q, k, v, q_cuts, k_cuts, bias, scale, **mask)
    elif family == "block":
        block = rng.choice([1, 3, 32, 64, 2**40])
        out = block_attention(q, k, v, q_offsets, max_q, block=block, scale=scale, causal=mask["causal"])
        cuts = [0]
        for begin, end in pairwise(q_cuts):
            cuts += [min(at + block, end) for at in range(begin, end, block)]
        expected = by_loops(q, k, v, cuts, cuts, None, scale, mask["causal"])
    else:
        facts: dict[str, Any] = {"activation": activation, "post_scale": 0.7, **mask}
        layout = (None if broadcast else q_offsets, k_offsets, max_q, max_k)
        out = generalized_attention(q, k, v, *layout, bias=bias, pre_scale=scale, broadcast_q=broadcast, **facts)
        asked = q.repeat(samples, 1, 1) if broadcast else q
        cuts = [rows * i for i in range(samples + 1)] if broadcast else q_cuts
        expected = by_loops(asked, k, v, cuts, k_cuts, bias, scale, **facts)
    wanted = [x for x in (q, k, v, *([] if family == "block" else [bias.position, bias.time])) if x is not None]
    grad = strided(torch.randn(out.shape), rng.randrange(2))
    found = [out, *torch.autograd.grad(out, wanted, grad)]
    exact = [expected]
    if expected.requires_grad:
        exact += torch.autograd.grad(expected, wanted, grad.double(), allow_unused=True)
    for x, y, like in zip(found, exact, [out, *wanted]):
        y = torch.zeros_like(like) if y is None else y
        assert x.shape == y.shape
        if x.numel():
            assert (x - y).detach().abs().max() <= 1e-4 * max(1.0, float(y.detach().abs().max()))


def test_a_table_may_be_of_positions_and_of_times() -> None:
    """Its gradient is the sum of both, in fp32: the same sums in another order."""
    t = tensors(JaggedCase(name="", q_lengths=(5, 0, 33), k_lengths=(5, 0, 33)))
    table, times = torch.randn(6, 2), torch.randint(0, 1000, (38,))

    def gradient(*tables: Tensor) -> Tensor:
        position, time = tables[0], tables[-1]
        given = {"q_times": times, "k_times": times, "time_bounds": log_time_bounds(6)}
        out = jagged_attention(t.q, t.k, t.v, *t.layout, bias=JaggedBias(position=position, time=time, **given))
        return torch.stack(torch.autograd.grad(out, tables, t.grad_out)).sum(0)

    one, two = table.clone().requires_grad_(), [table.clone().requires_grad_() for _ in range(2)]
    torch.testing.assert_close(gradient(one), gradient(*two), rtol=1e-5, atol=1e-5)


def test_sums_of_a_table_have_one_order() -> None:
    """On a CPU of several threads too."""
    torch.set_num_threads(4)
    scores, buckets = torch.randn(2, 2, 200, 200), torch.randint(0, 9, (2, 200, 200))
    first = table_gradient(scores, buckets, 9)
    assert all(same_bits(table_gradient(scores, buckets, 9), first) for _ in range(20))
    rows, index = scores.movedim(1, -1).flatten(0, 2), buckets.flatten()
    one_by_one = torch.stack([numpy_sum(rows[index == n]) for n in range(9)])
    assert same_bits(first, one_by_one)


def numpy_sum(rows: Tensor) -> Tensor:
    """The sum over rows in fp32, from the first to the last."""
    return torch.from_numpy(numpy.cumsum(rows.numpy(), axis=0, dtype=numpy.float32)[-1])


X, OFFSETS = torch.randn(12, 64), offsets_of((5, 0, 7))
HEADS = torch.randn(12, 2, 16)
QKV = (HEADS, HEADS, HEADS)
LAYOUT = (OFFSETS, OFFSETS, 7, 7)
TIMES = torch.randint(0, 1000, (12,))


def wrong(x: object) -> Any:
    """X, of whose type nobody is told."""
    return x


def run(**given: Any) -> Tensor:
    arguments: dict[str, Any] = dict(zip(("q", "k", "v", "q_offsets", "k_offsets", "max_q", "max_k"), QKV + LAYOUT))
    return jagged_attention(**(arguments | given))


def gdpa(**given: Any) -> Tensor:
    return generalized_attention(
        HEADS, HEADS, HEADS, *LAYOUT, **({"activation": "gelu", "pre_scale": 1.0, "post_scale": 1.0} | given)
    )


def timed(**given: Any) -> JaggedBias:
    bounds = log_time_bounds(3)
    tables = {"time": torch.randn(3, 2), "q_times": TIMES, "k_times": TIMES, "time_bounds": bounds}
    return JaggedBias(**(tables | given))


def attend(x: Any = X, offsets: Any = OFFSETS, longest: Any = None, **layer: Any) -> Tensor:
    return JaggedMultiheadAttention(64, 2, **layer)(x, offsets, longest)


WRONG: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "q": (lambda: run(q=None), TypeError, "jagged_attention: q: got NoneType, expected a tensor"),
    "numpy": (lambda: run(k=HEADS.numpy()), TypeError, "jagged_attention: k: got ndarray, expected a tensor"),
    "no q_offsets": (lambda: run(q_offsets=None), ValueError, "jagged_attention: q_offsets: got NoneType"),
    "no dim": (lambda: run(q=HEADS[..., :0], k=HEADS[..., :0]), ValueError, "with heads of 1 or more features"),
    "float max": (lambda: run(max_q=7.0), TypeError, "the maximum length of q_offsets: got 7.0, expected an int"),
    "no max": (lambda: run(max_k=None), TypeError, "the maximum length of k_offsets: got None, expected an int"),
    "bool max": (lambda: run(max_k=True), TypeError, "the maximum length of k_offsets: got True, expected an int"),
    "tensor scale": (lambda: run(scale=torch.tensor(0.5)), TypeError, "scale: got a tensor, expected a number; mult"),
    "nan": (lambda: run(scale=math.nan), ValueError, "scale: got nan, expected a finite number"),
    "no pre_scale": (lambda: gdpa(pre_scale=None), TypeError, "pre_scale: got None, expected a number"),
    "function": (lambda: gdpa(activation=F.gelu), ValueError, "activation: got <built-in function gelu>, expected one"),
    "causal": (lambda: run(causal="yes"), TypeError, "causal: got 'yes', expected True or False"),
    "block causal": (lambda: block_attention(*QKV, OFFSETS, 7, causal=wrong(1)), TypeError, "causal: got 1"),
    "config": (lambda: run(config="mxfp8"), TypeError, "config: got str, expected AttentionConfig.of"),
    "precision": (lambda: run(config=AttentionPrecision()), TypeError, "config: got AttentionPrecision, expected"),
    "schedule": (lambda: run(schedule=[1]), TypeError, "schedule: got list, expected what jagged_schedule"),
    "schedule dtype": (lambda: gdpa(schedule=torch.zeros(3)), TypeError, "schedule: got torch.float32, expected what"),
    "times": (lambda: run(bias=timed(q_times=[1])), TypeError, "bias.q_times: got list, expected a tensor"),
    "table": (lambda: gdpa(bias=JaggedBias(position=wrong([1.0]))), TypeError, "bias.position: got list"),
    "descending": (lambda: gdpa(bias=timed(time_bounds=torch.tensor([9, 3]))), ValueError, "bounds that decrease"),
    "one copy": (lambda: run(cpu_offsets=(OFFSETS,)), ValueError, "cpu_offsets: got 1, expected copies of q_offsets"),
    "list copy": (lambda: run(cpu_offsets=([0], [0])), ValueError, "cpu_offsets: got list, expected a copy of q_offse"),
    "short copy": (lambda: run(cpu_offsets=(OFFSETS, OFFSETS[:2])), ValueError, r"cpu_offsets: got \(2,\) .*k_offsets"),
    "buckets": (lambda: log_time_bounds(0), ValueError, "log_time_bounds: buckets: got 0"),
    "width": (lambda: log_time_bounds(4, 0.0), ValueError, "log_time_bounds: width: got 0.0"),
    "check list": (lambda: check_offsets(wrong([0, 3]), 3, 3), ValueError, "check_offsets: got list"),
    "check none": (lambda: check_offsets(OFFSETS[:0], 3, 3), ValueError, r"check_offsets: got \(0,\)"),
    "check dtype": (lambda: check_offsets(OFFSETS.float(), 12, 7), TypeError, "check_offsets: got torch.float32"),
    "schedule of": (lambda: jagged_schedule(wrong([0]), *LAYOUT[1:], total_q=9, total_k=9), ValueError, "got list"),
    "list": (lambda: attend(X.tolist()), TypeError, "JaggedMultiheadAttention: values: got list, expected a tensor"),
    "list of offsets": (lambda: attend(offsets=[0, 12]), TypeError, "Attention: offsets: got list, expected a tensor"),
    "features": (lambda: attend(X[:, :32]), ValueError, "got tokens of 32 features, expected 64"),
    "text": (lambda: attend(longest="7"), TypeError, "the maximum length: got '7', expected an int"),
    "0": (lambda: attend(longest=0, max_length=9), ValueError, "length 7, more than the declared maximum 0"),
    "dense": (lambda: attend(X.view(2, 6, 64), None, 5), ValueError, "samples of 6 tokens, more than the maximum 5"),
    "own max": (lambda: attend(X.view(2, 6, 64), None, max_length=5), ValueError, "more than the maximum 5; raise it"),
    "hstu": (lambda: HSTUAttention(64, 2, max_length=5)(X.view(2, 6, 64)), ValueError, "HSTUAttention: got samples"),
    "context": (lambda: CrossAttention(64, 2)(X, None, OFFSETS), TypeError, "context: values: got NoneType"),
    "heads": (lambda: JaggedMultiheadAttention(64, 0), ValueError, "heads: got 0, expected an int, 1 or more"),
    "several": (lambda: JaggedMultiheadAttention(64, -2, head_dim=0), ValueError, "heads: got -2, head_dim: got 0"),
    "kv_heads": (lambda: CrossAttention(64, 4, kv_heads=3), ValueError, "kv_heads: got 3 for 4 heads, expected a divi"),
    "seeds": (lambda: PooledAttention(64, 2, 0), ValueError, "PooledAttention: seeds: got 0"),
    "seeds' times": (lambda: PooledAttention(64, 2, 3, time_buckets=4), ValueError, "seeds have no times"),
    "window": (lambda: attend(window=2.5), ValueError, "JaggedAttention: window: got 2.5, expected None or positions"),
    "positions": (lambda: attend(positions=-1), ValueError, "JaggedAttention: positions: got -1, expected an int"),
    "scale": (lambda: attend(scale="a"), TypeError, "JaggedAttention: scale: got 'a', expected a number"),
    "activation": (lambda: attend(activation=None), ValueError, "activation: got None, expected one of softmax, gelu"),
    "max_length": (lambda: HSTUAttention(64, 2, max_length=0), ValueError, "HSTUAttention: max_length: got 0"),
    "no max_length": (lambda: HSTUAttention(64, 2, max_length=wrong(None)), ValueError, "max_length: got None"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_wrong_arguments_are_one_clear_error(name: str) -> None:
    call, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        call()


def test_numbers_of_numpy_are_numbers() -> None:
    expected = run(scale=0.5)
    assert same_bits(run(scale=numpy.float64(0.5), max_q=numpy.int64(7)), expected)
    assert same_bits(run(scale=numpy.float32(0.5)), expected)


def test_a_nested_batch_keeps_what_it_says_of_its_longest_sample() -> None:
    """A declared maximum does not become the length that the output pads to; no sample is a batch as well."""
    layer = JaggedMultiheadAttention(64, 2, max_length=40)
    for known in (None, 7):
        x = torch.nested.nested_tensor_from_jagged(X, OFFSETS, max_seqlen=known)
        assert layer(x)._maybe_max_seqlen == known
        assert (x + layer(x)).to_padded_tensor(0.0).shape == x.to_padded_tensor(0.0).shape
    none = torch.nested.nested_tensor_from_jagged(X[:0], OFFSETS[:1])
    for layer in (JaggedMultiheadAttention(64, 2), HSTUAttention(64, 2, max_length=9)):
        assert layer(none).values().shape == (0, 64)


def test_bounds_of_times_are_where_the_tables_are() -> None:
    """Made on a default device, emptied, or left on meta by a checkpoint that has none."""
    exact = HSTUAttention(64, 2, max_length=9, time_buckets=5)
    expected = exact(X, OFFSETS, times=TIMES)

    def on_meta() -> HSTUAttention:
        with torch.device("meta"):
            return HSTUAttention(64, 2, max_length=9, time_buckets=5)

    bare = on_meta()
    assert bare.core.time_bounds is not None
    assert bare.core.time_bounds.is_meta
    assert bare(X.to("meta"), OFFSETS.to("meta"), times=TIMES.to("meta")).shape == X.shape
    emptied, assigned = on_meta().to_empty(device="cpu"), on_meta()
    emptied.load_state_dict(exact.state_dict())
    assigned.load_state_dict(exact.state_dict(), assign=True)
    for layer in (emptied, assigned):
        assert same_bits(layer(X, OFFSETS, times=TIMES), expected)


def test_tables_of_a_half_precision_follow_autocast() -> None:
    core = JaggedAttention(2, 16, positions=5).bfloat16()
    heads = HEADS.bfloat16()
    with torch.autocast("cpu", torch.float16):
        out = core(heads, heads, heads, *LAYOUT)
    out.sum().backward()
    assert out.dtype is torch.float16
    assert core.position is not None
    assert core.position.grad is not None
    assert core.position.grad.dtype is torch.bfloat16


@pytest.mark.parametrize("activation", ["gelu", "softmax"])
def test_pooling_compiles_with_its_gradients(activation: str) -> None:
    """Fakes have the strides of what the ops return."""
    torch.compiler.reset()
    pool = PooledAttention(64, 2, 3, activation=activation)
    apply_recipe(pool, "mxfp8")
    results = []
    for layer in (pool, torch.compile(pool, backend="aot_eager", fullgraph=True)):
        pool.zero_grad()
        out = layer(X, OFFSETS, 7)
        out.square().sum().backward()
        results.append([out.detach(), *(p.grad for p in pool.parameters())])
    assert all(map(same_bits, *results))
    torch.compiler.reset()


LIMITS: list[tuple[str, torch.dtype, int, int, str]] = [
    ("block_forward", torch.float32, 64, 64, "got float32, kernels take bf16 and fp16"),
    ("generalized_forward", torch.float32, 64, 0, "got float32, kernels take bf16 and fp16"),
    ("jagged_forward", torch.bfloat16, 272, 0, "got heads 272 wide, kernels take up to 256"),
    ("block_forward", torch.bfloat16, 64, 48, "got block=48, kernels take 32, 64, 128"),
    ("block_forward", torch.bfloat16, 24, 64, "got heads 24 and 24 wide, kernels take multiples of 16 up to 256"),
    ("block_forward", torch.bfloat16, 144, 128, "multiples of 16 up to 128 at block=128"),
]


@pytest.mark.filterwarnings("ignore:.*_backward. got")
@pytest.mark.parametrize(("op", "dtype", "width", "block", "said"), LIMITS)
def test_what_no_kernel_takes_runs_on_the_reference_and_is_said(
    op: str, dtype: torch.dtype, width: int, block: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, with the reference's bits; and what a kernel takes goes to the kernel."""
    t = tensors(JaggedCase(name="", q_lengths=(5,), k_lengths=(5,), dim=width, value_dim=width), dtype=dtype)
    q, k, v = leaves = [x.requires_grad_() for x in (t.q, t.k, t.v)]

    def call() -> list[Tensor]:
        if op.startswith("block"):
            out = block_attention(q, k, v, t.q_offsets, 5, block=block)
        elif op.startswith("generalized"):
            out = generalized_attention(q, k, v, *t.layout, activation="relu", pre_scale=0.2, post_scale=1.0)
        else:
            out = jagged_attention(q, k, v, *t.layout)
        return [out, *torch.autograd.grad(out, leaves, t.grad_out)]

    expected = call()
    monkeypatch.setattr(ops, "select", lambda device: "hopper")
    with pytest.warns(UserWarning, match=f"{op}: .*{said}.*; it runs on the reference"):
        found = call()
    assert all(map(same_bits, found, expected))
    taken = t.q.new_empty(1, 1, 64, dtype=torch.bfloat16)
    assert jagged_limits.problem(op, taken, taken, 64) == ""


def test_limits_are_the_kernels() -> None:
    kernels = pytest.importorskip("mxfp8_recipe.fused.attention.block")
    launch = pytest.importorskip("mxfp8_recipe.fused.attention.jagged_launch")
    assert (jagged_limits.BLOCKS, jagged_limits.WIDEST) == (kernels.BLOCKS, launch.MAX_WIDTH)


def test_the_schedule_of_another_batch_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(ops, "select", lambda device: "hopper")
    smaller = jagged_schedule(OFFSETS[:2], OFFSETS[:2], 7, 7, total_q=5, total_k=5)
    for call in (run, gdpa):
        with pytest.raises(ValueError, match="it is that of another batch; make one for each"):
            call(schedule=smaller)


def test_every_layer_takes_batches_of_nothing() -> None:
    """Under a recipe, fused, forward and backward: no sample, no token, all samples empty, one token."""
    self_attention, hstu = JaggedMultiheadAttention(64, 2, causal=True), HSTUAttention(64, 2, max_length=9)
    model = nn.ModuleList([self_attention, hstu, PooledAttention(64, 2, 3), CrossAttention(64, 2)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apply_recipe(model, "mxfp8")
    for lengths in ((), (0,), (0, 0, 0), (1,)):
        offsets, x = offsets_of(lengths), torch.randn(sum(lengths), 64)
        model.zero_grad()
        for layer in model:
            extra = {"context_offsets": offsets} if isinstance(layer, CrossAttention) else {"offsets": offsets}
            given = (torch.randn(len(lengths), 2, 64), x) if isinstance(layer, CrossAttention) else (x,)
            layer(*given, **extra).sum().backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in model.parameters())


def test_the_config_of_a_layer_names_it_in_every_error() -> None:
    named = AttentionConfig.of(AttentionPrecision(), layer="tower.core")
    for wrong in ({"q": None}, {"max_q": 7.0}, {"scale": "a"}, {"schedule": [1]}, {"causal": 3}):
        with pytest.raises(TypeError, match=r"^tower\.core: "):
            run(config=named, **wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["hstu", "pool", "block"])
def test_on_a_gpu_fp32_runs_and_is_said(name: str) -> None:
    """Against the CPU, in fp32: rounding alone. Under autocast nothing is said."""
    layer: nn.Module = (
        HSTUAttention(64, 2, max_length=9) if name == "hstu" else PooledAttention(64, 2, 3, activation="gelu")
    )

    def call(device: str) -> Tensor:
        x, offsets = X.to(device), OFFSETS.to(device)
        if name == "block":
            heads = HEADS.to(device)
            return block_attention(heads, heads, heads, offsets, 7)
        return layer(x, offsets) if name == "hstu" else layer(x, offsets, 7)

    expected = call("cpu")
    layer.cuda()
    with pytest.warns(UserWarning, match="it runs on the reference"):
        found = call("cuda")
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-4)
    with warnings.catch_warnings(), torch.autocast("cuda", torch.bfloat16):
        warnings.filterwarnings("error", ".*runs on the reference")
        assert call("cuda").dtype is torch.bfloat16


@pytest.mark.gpu
def test_layers_are_made_where_torch_makes_tensors() -> None:
    with torch.device("cuda"):
        layer = HSTUAttention(64, 2, max_length=9, time_buckets=5).bfloat16()
    with torch.no_grad():
        out = layer(X.cuda().bfloat16(), OFFSETS.cuda(), times=TIMES.cuda())
    assert out.isfinite().all()
