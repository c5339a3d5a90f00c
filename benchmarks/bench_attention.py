"""Time jagged attention against the best public kernels, on short ragged batches.

    python benchmarks/bench_attention.py [jfa|fill|window|gdpa|block] [--out FILE] [--commit HASH] [--quick]

Lengths are uniform around `fill` times the longest; TFLOP/s count the useful products, `4 H D sum(Lq Lk)` forward and
2.5 times that backward. Providers: `ours`, with the schedule shared as a model shares it; `varlen_attn` of torch
(FlashAttention-2); `flash_attn_4`, its Hopper path, where it is installed, else `flash_attn_4_scaled`: its figures of
`FIGURES`, times what this run's `varlen_attn` took against its own figure; `padded_sdpa`. Every provider's output and
gradients are held against float64 on a few samples, and a worse SQNR than `LEAST_DB` gets no number. Each runs in a
CUDA graph if it can be captured (`mode=graph`), in rounds that take the providers in turn; what makes a schedule, once
a batch for all layers and both passes, is a row of its own (`op=schedule`).
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rows import RESULTS, add_options, append, gpu_environment, quantiles_ms
from fused.attention import jagged, schedule

BF16 = torch.bfloat16
ROUNDS, REPLAYS, PAUSE_S = 5, 4, 0.02
SAMPLES_CHECKED = 6
LEAST_DB = 40.0
"""Of bf16 operands, P and dS rounded to bf16: about 50 dB forward, 46 dB backward."""
FIGURES = {
    "B256-H4-D128-L1024-fill0.5": ((281, 354), (220, 358)),
    "B1152-H4-D128-L512-fill0.5": ((226, 204), (163, 230)),
    "B64-H4-D128-L4096-fill0.5": ((328, 581), (286, 542)),
}
"""TFLOP/s of varlen_attn and of flash-attn-4 4.0.0b36, forward and backward, of one run on an H200 (torch 2.11)."""

Run = Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A batch: samples, longest, mean fill, heads of q, k and v, their width."""

    samples: int
    longest: int
    fill: float = 0.5
    heads: int = 4
    dim: int = 128

    @property
    def case(self) -> str:
        return f"B{self.samples}-H{self.heads}-D{self.dim}-L{self.longest}-fill{self.fill}"

    def lengths(self) -> Tensor:
        """(B,) on the GPU, uniform about `fill * longest` and as wide as 1..longest allows."""
        least = max(1, round((2 * self.fill - 1) * self.longest))
        most = min(self.longest, round(2 * self.fill * self.longest))
        generator = torch.Generator(device="cuda").manual_seed(0)
        return torch.randint(least, most + 1, (self.samples,), device="cuda", generator=generator)


@dataclass
class Batch:
    """Operands of one shape, in bf16."""

    shape: Shape
    lengths: Tensor
    offsets: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, shape: Shape, **options: Any) -> Batch:
        """Standard normal; `options`: mask of `jagged.forward`."""
        lengths = shape.lengths()
        offsets = torch.cat((lengths.new_zeros(1), lengths.cumsum(0))).int()
        size = int(offsets[-1]), shape.heads, shape.dim
        generator = torch.Generator(device="cuda").manual_seed(1)
        q, k, v, do = (torch.randn(size, device="cuda", dtype=BF16, generator=generator) for _ in range(4))
        return cls(shape, lengths, offsets, q, k, v, do, options)

    @property
    def scale(self) -> float:
        return self.shape.dim**-0.5

    @property
    def layout(self) -> tuple[Tensor, Tensor, int, int]:
        return self.offsets, self.offsets, self.shape.longest, self.shape.longest

    def pairs(self) -> float:
        """Visible pairs of all samples."""
        window = self.options.get("window")
        full = self.lengths.double() ** 2
        if window is None:
            return float(full.sum())
        hidden = (self.lengths - window - 1).clamp(min=0).double()
        return float((full - hidden * (hidden + 1)).sum())

    def gflop(self) -> dict[str, float]:
        forward = 4e-9 * self.shape.heads * self.shape.dim * self.pairs()
        return {"fwd": forward, "bwd": 2.5 * forward}


@dataclass(frozen=True)
class Provider:
    """Forward, which gives (T, H, D), and backward, which gives dq, dk and dv."""

    forward: Callable[[], Tensor]
    backward: Callable[[], tuple[Tensor, ...]]


def ours(b: Batch) -> Provider:
    total = len(b.q)
    made = schedule.build(b.offsets, b.offsets, total, total, *b.layout[2:], **b.options)
    common: dict[str, Any] = {"scale": b.scale, **b.options}
    out, lse = jagged.forward(b.q, b.k, b.v, *b.layout, None, made, **common)

    def backward() -> tuple[Tensor, Tensor, Tensor]:
        return jagged.backward(b.grad_out, b.q, b.k, b.v, out, lse, *b.layout, None, made, wanted="qkv", **common)[:3]

    return Provider(lambda: jagged.forward(b.q, b.k, b.v, *b.layout, None, made, **common)[0], backward)


def through_autograd(function: Callable[[Tensor, Tensor, Tensor], Tensor], b: Batch) -> Provider:
    inputs = [x.detach().requires_grad_() for x in (b.q, b.k, b.v)]
    out = function(inputs[0], inputs[1], inputs[2])

    def forward() -> Tensor:
        with torch.no_grad():
            return function(b.q, b.k, b.v)

    return Provider(forward, lambda: torch.autograd.grad(out, inputs, b.grad_out, retain_graph=True))


def varlen(b: Batch) -> Provider:
    from torch.nn.attention.varlen import varlen_attn

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = varlen_attn(q, k, v, *b.layout)
        return out[0] if isinstance(out, tuple) else out

    return through_autograd(call, b)


def flash_attn_4(b: Batch) -> Provider:
    from flash_attn.cute import flash_attn_varlen_func  # pyright: ignore[reportMissingImports]

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        names = ("cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
        out = flash_attn_varlen_func(q, k, v, **dict(zip(names, b.layout)))
        return out[0] if isinstance(out, tuple) else out

    return through_autograd(call, b)


def padded_sdpa(b: Batch) -> Provider:
    """SDPA over samples padded to the longest, with a mask of the keys there are; layouts converted beforehand."""
    place = torch.arange(b.shape.longest, device="cuda")
    valid = place < b.lengths[:, None]
    mask = valid[:, None, None, :]

    def padded(x: Tensor) -> Tensor:
        wide = x.new_zeros(*valid.shape, *x.shape[1:])
        wide[valid] = x
        return wide.transpose(1, 2).contiguous()

    inputs = [padded(x).requires_grad_() for x in (b.q, b.k, b.v)]
    grad = padded(b.grad_out)
    out = F.scaled_dot_product_attention(*inputs, attn_mask=mask)

    def unpadded(x: Tensor) -> Tensor:
        return x.transpose(1, 2)[valid]

    def backward() -> Any:
        return torch.autograd.grad(out, inputs, grad, retain_graph=True)

    def forward() -> Tensor:
        with torch.no_grad():
            return F.scaled_dot_product_attention(*inputs, attn_mask=mask)

    forward.unpadded = backward.unpadded = unpadded
    return Provider(forward, backward)


def exact_samples(b: Batch) -> list[tuple[slice, list[Tensor]]]:
    """Rows, and out, dq, dk, dv in float64, of the shortest, the longest and some other samples."""
    order = b.lengths.argsort().tolist()
    picked = {order[i * (len(order) - 1) // (SAMPLES_CHECKED - 1)] for i in range(SAMPLES_CHECKED)}
    found = []
    for sample in sorted(picked):
        rows = slice(*b.offsets[sample : sample + 2].tolist())
        q, k, v = (x[rows].transpose(0, 1).double().requires_grad_() for x in (b.q, b.k, b.v))
        scores = q @ k.transpose(1, 2) * b.scale
        place = torch.arange(q.shape[1], device="cuda")
        if "window" in b.options:
            far = (place[:, None] - place).abs() > b.options["window"]
            scores = scores.masked_fill(far, float("-inf"))
        out = scores.softmax(-1) @ v
        grads = torch.autograd.grad(out, (q, k, v), b.grad_out[rows].transpose(0, 1).double())
        found.append((rows, [x.detach().transpose(0, 1) for x in (out, *grads)]))
    return found


def sqnr(b: Batch, provider: Provider, exact: list[tuple[slice, list[Tensor]]]) -> dict[str, float]:
    """DB of out, dq, dk, dv over the samples of `exact`."""
    unpadded = getattr(provider.forward, "unpadded", lambda x: x)
    values = [unpadded(x) for x in (provider.forward(), *provider.backward())]
    found = {}
    for i, name in enumerate(("out", "dq", "dk", "dv")):
        noise = sum(float((values[i][rows].double() - wanted[i]).square().sum()) for rows, wanted in exact)
        signal = sum(float(wanted[i].square().sum()) for _, wanted in exact)
        found[f"sqnr_{name}"] = round(float(10 * torch.log10(torch.tensor(signal / max(noise, 1e-300)))), 2)
    return found


def capture(run: Run) -> tuple[Run, str]:
    """`run` as a CUDA graph if it can be one, and its mode.

    On the current stream, if it is not the default one: autograd runs a backward where its forward ran.
    """
    current, default = torch.cuda.current_stream(), torch.cuda.default_stream()
    stream = torch.cuda.Stream() if current == default else current
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph, stream=stream):
            run()
    except RuntimeError as error:
        torch.cuda.synchronize()
        print(f"not captured: {str(error)[:150]}", file=sys.stderr)
        return run, "eager"
    return graph.replay, "graph"


def time_in_turn(runs: dict[str, Run], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Milliseconds of each call."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            time.sleep(PAUSE_S)
            run()
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(REPLAYS + 1)]
            marks[0].record()
            for mark in marks[1:]:
                run()
                mark.record()
            torch.cuda.synchronize()
            times[name] += [start.elapsed_time(stop) for start, stop in itertools.pairwise(marks)]
    return times


def checked(b: Batch, makers: dict[str, Callable[[Batch], Provider]]) -> dict[str, tuple[Provider, dict[str, float]]]:
    """Providers that are there and right, with their SQNR."""
    exact, found = exact_samples(b), {}
    for name, make in makers.items():
        try:
            provider = make(b)
            quality = sqnr(b, provider, exact)
        except Exception as error:  # a peer that is missing, or fails at this shape, is no reason to stop
            if name == "ours":
                raise
            print(f"{b.shape.case} {name}: {type(error).__name__}: {str(error)[:150]}", file=sys.stderr)
            continue
        if min(quality.values()) < LEAST_DB:
            print(f"{b.shape.case} {name}: no number, {quality}", file=sys.stderr)
        else:
            found[name] = provider, quality
    return found


def rows_of(
    b: Batch, op: str, makers: dict[str, Callable[[Batch], Provider]], stamp: dict[str, str], rounds: int
) -> list[dict[str, Any]]:
    """A row for each pass and provider; `ratio_to_best` is the fastest peer's time over the provider's."""
    providers, rows = checked(b, makers), []
    for passed in ("fwd", "bwd"):
        calls = {n: p.forward if passed == "fwd" else p.backward for n, (p, _) in providers.items()}
        captured = {name: capture(run) for name, run in calls.items()}
        times = time_in_turn({name: run for name, (run, _) in captured.items()}, rounds)
        found = {name: quantiles_ms(values) for name, values in times.items()}
        if "flash_attn_4" not in found and "varlen_attn" in found and b.shape.case in FIGURES and not b.options:
            theirs, fa4 = FIGURES[b.shape.case][passed == "bwd"]
            found["flash_attn_4_scaled"] = {n: ms * theirs / fa4 for n, ms in found["varlen_attn"].items()}
        peers = [ms["ms_median"] for name, ms in found.items() if name != "ours"]
        for name, ms in found.items():
            gflop = b.gflop()[passed]
            row = {
                "bench": "attention", "case": b.shape.case, "provider": name,
                "variant": f"op={op},pass={passed},mode={captured[name][1] if name in captured else 'scaled'}",
                **ms, "tflops": round(gflop / ms["ms_median"], 1),
                "ratio_to_best": round(min(peers) / ms["ms_median"], 3) if peers else None,
                **(providers[name][1] if name in providers else {}), **stamp,
            }  # fmt: skip
            rows.append(row)
    return rows


def jfa_rows(stamp: dict[str, str], rounds: int) -> Iterator[list[dict[str, Any]]]:
    """Full attention against every peer."""
    peers = {"ours": ours, "varlen_attn": varlen, "flash_attn_4": flash_attn_4}
    for samples, longest in ((256, 1024), (1152, 512), (64, 4096)):
        makers = peers | ({"padded_sdpa": padded_sdpa} if longest == 1024 else {})
        yield rows_of(Batch.of(Shape(samples=samples, longest=longest)), "jfa", makers, stamp, rounds)


def fill_rows(stamp: dict[str, str], rounds: int) -> Iterator[list[dict[str, Any]]]:
    """Time follows the work: `rate_to_half` is TFLOP/s over those at fill 0.5."""
    found = []
    for fill in (0.5, 0.3, 0.9):
        batch = Batch.of(Shape(samples=1152, longest=1024, fill=fill))
        found.append([*rows_of(batch, "jfa-fill", {"ours": ours}, stamp, rounds), schedule_row(batch, stamp, rounds)])
    for rows in found:
        for row, half in zip(rows[:2], found[0]):
            row["rate_to_half"] = round(row["tflops"] / half["tflops"], 3)
        yield rows


def schedule_row(b: Batch, stamp: dict[str, str], rounds: int) -> dict[str, Any]:
    """What `ours` is given ready-made: the tiles of a batch in order."""
    total = len(b.q)
    run, mode = capture(lambda: schedule.build(b.offsets, b.offsets, total, total, *b.layout[2:], **b.options))
    return {
        "bench": "attention", "case": b.shape.case, "provider": "ours", "variant": f"op=schedule,mode={mode}",
        **quantiles_ms(time_in_turn({"ours": run}, rounds)["ours"]), "tflops": None, **stamp,
    }  # fmt: skip


def window_rows(stamp: dict[str, str], rounds: int) -> Iterator[list[dict[str, Any]]]:
    """A window of 128 each way against all keys: `ratio_to_full`."""
    shape = Shape(samples=256, longest=2048)
    full = rows_of(Batch.of(shape), "jfa", {"ours": ours}, stamp, rounds)
    windowed = rows_of(Batch.of(shape, window=128), "window128", {"ours": ours}, stamp, rounds)
    for row, all_keys in zip(windowed, full):
        row["ratio_to_full"] = round(all_keys["ms_median"] / row["ms_median"], 2)
    yield full
    yield windowed


def gdpa_rows(stamp: dict[str, str], rounds: int) -> Iterator[list[dict[str, Any]]]:
    """Generalized attention against cuBLAS: `gdpa_rows.py`, which imports this file."""
    from benchmarks import gdpa_rows

    yield from gdpa_rows.gdpa_rows(stamp, rounds)


def block_rows(stamp: dict[str, str], rounds: int) -> Iterator[list[dict[str, Any]]]:
    """Block attention against a copy: `gdpa_rows.py`."""
    from benchmarks import gdpa_rows

    yield from gdpa_rows.block_rows(stamp, rounds)


BENCHES = {"jfa": jfa_rows, "fill": fill_rows, "window": window_rows, "gdpa": gdpa_rows, "block": block_rows}


def show(row: dict[str, Any]) -> str:
    extra = " ".join(
        f"{n}={row[n]}" for n in row if n.startswith(("ratio_", "rate_", "pct_", "sqnr_")) and row[n] is not None
    )
    return (
        f"{row['case']} {row['variant']} {row['provider']}: {row['ms_median']:.4f} ms {row['tflops']} TFLOP/s {extra}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("bench", nargs="?", choices=BENCHES)
    add_options(parser, RESULTS)
    parser.add_argument("--quick", action="store_true", help="one round of each timing")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_attention: found no CUDA device")
    torch.manual_seed(0)
    stamp = gpu_environment(options.commit)
    with torch.cuda.stream(torch.cuda.Stream()):
        for name in [options.bench] if options.bench else BENCHES:
            for rows in BENCHES[name](stamp, 1 if options.quick else ROUNDS):
                append(options.out, rows)
                for row in rows:
                    print(show(row), flush=True)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
