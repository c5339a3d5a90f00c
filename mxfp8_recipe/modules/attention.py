"""Attention in MXFP8: modules that call `F.scaled_dot_product_attention`, and `nn.MultiheadAttention`.

Also torch's encoder layers that hold a converted layer: in evaluation they would hand all weights to one
inference kernel, past the layers that own them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..autograd import AttentionConfig, HeadsSpec
from ..functional import mxfp8_attention, mxfp8_linear, mxfp8_projection
from ..fused.attention.spec import GEMMS
from ..fused.spec import BLOCK, QuantSpec
from ..mx_edge import Edge
from .swapped import describe_config, is_swapped, swap_class

_SLOW = "no inference fast path"
IN_PROJ, OUT_PROJ = "in_proj", "out_proj"
"""The linears of a multi-head layer, as a monitor names them."""


class SDPAOwner(nn.Module):
    """A module whose forward calls `F.scaled_dot_product_attention`: each call runs in MXFP8.

    Calls by modules inside it count as its own, unless they are `SDPAOwner`s themselves.
    """

    original_class: ClassVar[type[nn.Module]] = nn.Module
    mxfp8_config: AttentionConfig

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with ReplaceSDPA(self.mxfp8_config, self.__dict__.get("mxfp8_edge")):
            return self.original_class.forward(self, *args, **kwargs)

    def extra_repr(self) -> str:
        own = self.original_class.extra_repr(self)
        return ", ".join(filter(None, (own, describe_attention(self.mxfp8_config))))


class ReplaceSDPA(TorchFunctionMode):
    """While entered, `F.scaled_dot_product_attention` is `mxfp8_attention` with `config`; nothing else changes."""

    def __init__(self, config: AttentionConfig, edge: Edge | None = None) -> None:
        super().__init__()
        self.config, self.edge = config, edge

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.unflatten:
            return args[0].unflatten(*args[1:], **kwargs)  # its `super()` call does not trace under a mode
        if func is not F.scaled_dot_product_attention:
            return func(*args, **kwargs)
        if self.config.is_high:
            with torch._C.DisableTorchFunction():  # an enclosing owner must not take the call over
                return func(*args, **kwargs)
        return mxfp8_attention(*args, **kwargs, config=self.config, edge=self.edge)


class MXFP8MultiheadAttention(nn.MultiheadAttention):
    """`nn.MultiheadAttention` with its projections and its attention in MXFP8; the parameters are unchanged.

    Where query, key and value are one tensor, one quantization serves the three projections. A query that sees
    no key gets 0, and weights of 0, with and without `need_weights`.
    """

    original_class: ClassVar[type[nn.Module]] = nn.MultiheadAttention
    mxfp8_config: AttentionConfig

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        if query.is_nested or key.is_nested or value.is_nested:
            raise ValueError(f"{self.mxfp8_config.layer or type(self).__name__}: got nested tensors; pad the batch")
        causal, mask = _masks(self, query, key_padding_mask, attn_mask, is_causal, need_weights)
        edge = None if causal or mask is not None or need_weights else _inner_edge(self, query)
        projected = _project_heads(self, query, edge) if edge and query is key and key is value else None
        q, k, v = (_split_heads(self, x) for x in projected or _project(self, query, key, value))
        dropout_p = self.dropout if self.training else 0.0
        out = mxfp8_attention(
            q, k, v, mask, dropout_p, causal, config=self.mxfp8_config, need_weights=need_weights, edge=edge
        )
        out, weights = out if need_weights else (out, None)
        merged = _merge_heads(self, out)
        output = _linear(self, OUT_PROJ, merged, self.out_proj.weight, self.out_proj.bias)
        if weights is not None and average_attn_weights:
            weights = weights.mean(dim=-3)
        return output, weights

    def extra_repr(self) -> str:
        linear = self.mxfp8_config.projections
        projections = describe_config(linear) if linear else "bf16"
        return f"{describe_attention(self.mxfp8_config)}; projections: {projections}"


def multihead_problem(module: nn.MultiheadAttention) -> str:
    """Why this layer cannot be converted, or nothing."""
    if module.bias_k is not None or module.bias_v is not None:
        return "add_bias_kv=True appends learned keys and values, which MXFP8 attention does not do"
    if module.add_zero_attn:
        return "add_zero_attn=True appends a key and a value of zeros, which MXFP8 attention does not do"
    for name in ("embed_dim", "kdim", "vdim", "head_dim"):
        if getattr(module, name) % BLOCK:
            return f"{name}={getattr(module, name)} is not a multiple of {BLOCK}"
    return ""


def describe_attention(config: AttentionConfig) -> str:
    """The text a module adds to its `extra_repr`, from the config's six GEMMs."""
    parts = []
    for gemm in GEMMS:
        first, second = getattr(config, gemm)
        short = f"{QuantSpec.decode(first).short} @ {QuantSpec.decode(second).short}" if first else "bf16"
        parts.append(f"{gemm}={short}")
    return "attention: " + ", ".join(parts)


def _linear(module: nn.MultiheadAttention, part: str, x: Any, weight: Tensor, bias: Tensor | None) -> Tensor:
    config: AttentionConfig = module.mxfp8_config  # pyright: ignore[reportAssignmentType]
    projections = config.projections
    if projections is None:
        return F.linear(x, weight, bias)
    return mxfp8_linear(x, weight, bias, config=projections, owner=module, part=part)


def _project(module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, ...]:
    """Query, key and value (..., embed_dim) from the layer's packed or separate weights."""
    weight, bias, size = module.in_proj_weight, module.in_proj_bias, module.embed_dim
    if weight is not None and query is key and key is value:
        return _linear(module, IN_PROJ, query, weight, bias).chunk(3, dim=-1)
    biases = (None, None, None) if bias is None else bias.chunk(3)
    if weight is None:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        return tuple(_linear(module, IN_PROJ, x, w, b) for x, w, b in zip((query, key, value), weights, biases))
    if key is value:
        rest = None if bias is None else bias[size:]
        k, v = _linear(module, IN_PROJ, key, weight[size:], rest).chunk(2, dim=-1)
        return _linear(module, IN_PROJ, query, weight[:size], biases[0]), k, v
    pairs = zip((query, key, value), weight.chunk(3), biases)
    return tuple(_linear(module, IN_PROJ, x, w, b) for x, w, b in pairs)


def _inner_edge(module: nn.MultiheadAttention, query: Any) -> Edge | None:
    """The edge from the projections to attention and on to the output projection, where values may travel so."""
    config: AttentionConfig = module.mxfp8_config  # pyright: ignore[reportAssignmentType]
    linear = config.projections
    if not config.fuse or linear is None or not module.batch_first or query.dim() != 3:
        return None
    if not all((linear.fprop[0], linear.wgrad[1])) or linear.stochastic or not config.takes_heads:
        return None
    return Edge(config.layer, (f"{config.layer}.out_proj",), emit=linear.input_specs, head_dim=module.head_dim)


def _project_heads(module: nn.MultiheadAttention, x: Any, edge: Edge) -> tuple[Any, ...] | None:
    """Query, key and value of self-attention, emitted in MXFP8 by one projection."""
    config: AttentionConfig = module.mxfp8_config  # pyright: ignore[reportAssignmentType]
    if module.in_proj_weight is None or config.projections is None:
        return None
    parts = tuple(HeadsSpec(module.embed_dim, module.head_dim, row, col) for row, col in config.input_specs)
    weight, bias = module.in_proj_weight, module.in_proj_bias
    return mxfp8_projection(
        x, weight, bias, config=config.projections, parts=parts, edge=edge, owner=module, part=IN_PROJ
    )


def _split_heads(module: nn.MultiheadAttention, x: Any) -> Any:
    """(N, L, E), (L, N, E) or unbatched (L, E) to (N, H, L, D) or (H, L, D)."""
    heads = x.unflatten(-1, (module.num_heads, module.head_dim))
    if x.dim() == 2:
        return heads.transpose(0, 1)
    return heads.transpose(1, 2) if module.batch_first else heads.permute(1, 2, 0, 3)


def _merge_heads(module: nn.MultiheadAttention, x: Any) -> Any:
    """Inverse of `_split_heads`."""
    if x.dim() == 3:
        return x.transpose(0, 1).flatten(-2)
    return (x.transpose(1, 2) if module.batch_first else x.permute(2, 0, 1, 3)).flatten(-2)


def _masks(
    module: nn.MultiheadAttention,
    query: Tensor,
    padding: Tensor | None,
    mask: Tensor | None,
    is_causal: bool,
    need_weights: bool,
) -> tuple[bool, Tensor | None]:
    """`is_causal` and one mask as `mxfp8_attention` takes them; in torch's masks of this layer True hides."""
    if is_causal and mask is None:
        raise ValueError("is_causal: got no attn_mask, of which it is a hint; expected the causal mask itself")
    if is_causal and padding is None and not need_weights:
        return True, None
    batched = query.dim() == 3
    if mask is not None and mask.dim() == 3 and batched:
        mask = mask.unflatten(0, (-1, module.num_heads))
    if padding is not None:
        padding = padding[:, None, None, :] if batched else padding[None, :]
    given = [m for m in (mask, padding) if m is not None]
    if not given:
        return False, None
    if all(m.dtype is torch.bool for m in given):
        hidden = given[0] if len(given) == 1 else given[0] | given[1]
        return False, ~hidden
    floats = [torch.zeros_like(m, dtype=query.dtype).masked_fill(m, -torch.inf) if m.dtype is torch.bool else m
              for m in given]  # fmt: skip
    return False, floats[0] if len(floats) == 1 else floats[0] + floats[1]


class SlowEncoderLayer(nn.TransformerEncoderLayer):
    """An encoder layer that always calls its submodules, as it does in training."""

    original_class: ClassVar[type[nn.Module]] = nn.TransformerEncoderLayer
    carried: ClassVar[tuple[str, ...]] = ("activation_relu_or_gelu",)
    mxfp8_config: str

    @property
    def activation_relu_or_gelu(self) -> int:
        """0: an activation the inference kernel does not have. The instance keeps its own, for `revert`."""
        return 0

    @activation_relu_or_gelu.setter
    def activation_relu_or_gelu(self, value: int) -> None:
        self.__dict__["activation_relu_or_gelu"] = value


class SlowEncoder(nn.TransformerEncoder):
    """An encoder that does not turn padded batches into nested tensors, which only the inference kernel reads."""

    original_class: ClassVar[type[nn.Module]] = nn.TransformerEncoder
    carried: ClassVar[tuple[str, ...]] = ("use_nested_tensor",)
    mxfp8_config: str

    @property
    def use_nested_tensor(self) -> bool:
        """False; the instance keeps its own, for `revert`."""
        return False

    @use_nested_tensor.setter
    def use_nested_tensor(self, value: bool) -> None:
        self.__dict__["use_nested_tensor"] = value


def disable_fast_paths(model: nn.Module) -> int:
    """Make the encoders in `model` that hold a converted layer call it in evaluation too; how many there are.

    `restore` undoes it, as for every swapped module.
    """
    kinds = ((nn.TransformerEncoderLayer, SlowEncoderLayer), (nn.TransformerEncoder, SlowEncoder))
    found = [
        (module, slow)
        for module in model.modules()
        for known, slow in kinds
        if isinstance(module, known) and not is_swapped(module) and any(is_swapped(m) for m in module.modules())
    ]
    for module, slow in found:
        swap_class(module, slow, _SLOW)
    return len(found)


def is_slow_encoder(module: nn.Module) -> bool:
    """Whether a module was swapped only to call the layers inside it."""
    return module.__dict__.get("mxfp8_config") == _SLOW
