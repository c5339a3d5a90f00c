"""The swapped model on a GPU: its own kernels against the reference, fused against unfused, graphs, training."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mxfp8_recipe import apply_recipe, backends, load_recipe
from mxfp8_recipe.autograd import norm as norm_function
from mxfp8_recipe.config import Recipe

pytestmark = pytest.mark.gpu

WIDTH, HIDDEN = 256, 512
RECIPES = ("mxfp8", "mxfp8_hopper", "gem")


class Block(nn.Module):
    """Norm, up, activation, down and residual, as the fused path wants them."""

    def __init__(self, gated: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, HIDDEN) if gated else None
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        inner = F.gelu(self.up(h)) if self.gate is None else F.silu(self.gate(h)) * self.up(h)
        return x + self.down(inner)


def model(gated: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Block(gated), Block(gated)).cuda().to(dtype)


def data(tokens: int = 1000, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator(device="cuda").manual_seed(1)
    return torch.randn(tokens, WIDTH, device="cuda", dtype=dtype, generator=generator)


def recipe(name: str, **changes: object) -> Recipe:
    return load_recipe(name).model_copy(update={"gpu_min_features": 32, **changes})


def step(net: nn.Module, x: Tensor) -> list[Tensor]:
    """Output, input gradient and parameter gradients of one step."""
    x = x.detach().requires_grad_()
    net.zero_grad(set_to_none=True)
    torch.manual_seed(2)
    out = net(x)
    out.float().square().mean().backward()
    assert x.grad is not None
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    return [out.detach(), x.grad, *grads]


def sqnr_db(value: Tensor, expected: Tensor) -> float:
    error = (value.double() - expected.double()).norm()
    return float(20 * torch.log10(expected.double().norm() / error.clamp_min(1e-300)))


def test_the_device_has_a_backend_of_its_own() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("kernels of this device's own exist for compute capability 9 only")
    assert backends.select(torch.device("cuda")) == "hopper"
    native = {row.op for row in backends.describe("cuda") if row.status == "native"}
    assert {"quantize", "gemm", "norm_quantize", "activation_quantize"} <= native


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_kernels_agree_with_the_reference(name: str, gated: bool) -> None:
    """Same recipe, same weights: the GPU's kernels against plain torch on the CPU, and against BF16."""
    plain = model(gated)
    native, emulated = copy.deepcopy(plain), copy.deepcopy(plain).cpu()
    no_noise = {"rules": {}, "bf16_last_fraction": 0.0}
    apply_recipe(native, recipe(name, **no_noise), example_inputs=data(), strict=True)
    apply_recipe(emulated, recipe(name, **no_noise), example_inputs=data().cpu(), strict=True)
    if name == "gem":  # stochastic rounding draws from each device's own generator
        native.requires_grad_(False)
        emulated.requires_grad_(False)
    results = zip(step(native, data()), step(emulated, data().cpu()), step(plain, data()))
    for ours, reference, bf16 in results:
        agreement = sqnr_db(ours.cpu(), reference)
        quantization = sqnr_db(ours, bf16)
        assert agreement > quantization + 6, (agreement, quantization)
        assert 15 < quantization < 60


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("tokens", [1, 31, 1000])
@pytest.mark.parametrize("name", RECIPES)
def test_fused_equals_unfused_bitwise(name: str, tokens: int, gated: bool) -> None:
    fused, unfused = model(gated), model(gated)
    report = apply_recipe(fused, recipe(name), example_inputs=data(), strict=True)
    apply_recipe(unfused, recipe(name, fuse=False), example_inputs=data())
    assert sum(edge.fused for edge in report.plan.edges) >= 2
    for a, b in zip(step(fused, data(tokens)), step(unfused, data(tokens))):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("name", ["mxfp8", "mxfp8_hopper", "gem"])
def test_fused_equals_unfused_whatever_the_size_of_rows(name: str, dtype: torch.dtype) -> None:
    """Gradients of rows of many sizes add up exactly in no order, so fused kernels must sum in that of the others."""
    nets = [model(gated=True, dtype=dtype) for _ in range(2)]
    x = data(dtype=dtype)
    x *= torch.exp2(torch.arange(len(x), device="cuda") % 13 - 6).to(dtype)[:, None]
    for net, fuse in zip(nets, (True, False)):
        apply_recipe(net, recipe(name, fuse=fuse, rules={}, bf16_last_fraction=0.0), example_inputs=x)
    for a, b in zip(*(step(net, x) for net in nets)):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_dtypes_and_autocast(dtype: torch.dtype) -> None:
    net = model(dtype=dtype)
    apply_recipe(net, recipe("mxfp8_hopper"), example_inputs=data(dtype=dtype))
    assert all(torch.isfinite(t).all() for t in step(net, data(dtype=dtype)))
    with torch.autocast("cuda", torch.bfloat16):
        assert all(torch.isfinite(t).all() for t in step(net, data(dtype=dtype)))


def test_rows_stay_independent() -> None:
    net = model()
    apply_recipe(net, recipe("mxfp8_hopper"), example_inputs=data())
    x = data()
    with torch.no_grad():
        before = net(x)
        x[500] *= 2.0**12
        after = net(x)
    rows = torch.arange(len(x)) != 500
    assert torch.equal(before[rows], after[rows])
    assert not torch.equal(before[500], after[500])


@pytest.mark.parametrize("tokens", [1, 1000, 4099])
@pytest.mark.parametrize("norm", [nn.RMSNorm, nn.LayerNorm])
def test_replayed_calls_give_the_bits_of_those_that_were_recorded(norm: type[nn.Module], tokens: int) -> None:
    """Norm and linear, forward and backward, ragged token counts, and inputs whose addresses change."""
    torch.manual_seed(0)
    net = nn.Sequential(norm(WIDTH), nn.Linear(WIDTH, HIDDEN)).cuda().bfloat16()
    apply_recipe(net, recipe("mxfp8_hopper"), example_inputs=data(tokens))
    inputs = [data(tokens) * scale for scale in (1.0, -3.0)]
    forward, backward = norm_function._forward, norm_function._backward
    forward.tapes.clear()  # an earlier test may have recorded the same calls
    backward.tapes.clear()
    first = [step(net, x) for x in inputs]
    assert forward.tapes
    assert None not in forward.tapes.values()
    assert norm is nn.LayerNorm or None not in list(backward.tapes.values())[-1:]
    held = [torch.empty(tokens, WIDTH, device="cuda") for _ in range(3)]  # elsewhere in memory from here on
    for _ in range(2):
        for x, expected in zip(inputs, first):
            again = step(net, x.clone())
            assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    assert len(held) == 3


def test_a_step_replays_in_a_cuda_graph() -> None:
    net = model()
    apply_recipe(net, recipe("mxfp8_hopper"), example_inputs=data())
    x = data()
    for _ in range(2):
        expected = [t.clone() for t in step(net, x)]
    static = x.clone().requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        net(static).float().square().mean().backward()
    torch.cuda.current_stream().wait_stream(stream)
    net.zero_grad(set_to_none=True)
    static.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = net(static)
        out.float().square().mean().backward()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected[0])
    assert static.grad is not None
    assert torch.equal(static.grad, expected[1])


def test_compiled_equals_eager_bitwise() -> None:
    torch._dynamo.reset()
    net = model()
    apply_recipe(net, recipe("mxfp8_hopper"), example_inputs=data())
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for a, b in zip(step(net, data()), step(compiled, data())):
        assert torch.equal(a, b)


def test_training_lowers_the_loss_like_bf16() -> None:
    losses = {}
    for name in ("bf16", "mxfp8_hopper"):
        net = model(gated=True, dtype=torch.float32)
        apply_recipe(net, recipe(name) if name != "bf16" else name)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3, fused=True)
        x = data(2048, torch.float32)
        target = x.roll(1, dims=1)
        for _ in range(50):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = F.mse_loss(net(x).float(), target)
            loss.backward()
            optimizer.step()
        losses[name] = loss.item()
    assert losses["mxfp8_hopper"] == pytest.approx(losses["bf16"], rel=0.05)
    assert losses["mxfp8_hopper"] != losses["bf16"]
