"""Attention on queries, keys and values of a jagged batch, without the projections around it."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..autograd import AttentionConfig
from ..functional import JaggedBias, generalized_attention, jagged_attention, log_time_bounds
from ..functional.jagged_checks import check_activation, check_mask, check_numbers
from ..fused.attention.activations import ACTIVATIONS
from ..fused.spec import BLOCK
from .attention import describe_attention

SOFTMAX = "softmax"


def check_sizes(where: str, least: int = 1, /, **sizes: Any) -> None:
    """Raise one ValueError for all sizes of a layer that are no ints of at least `least`; None is not given."""
    wrong = [
        f"{name}: got {size!r}"
        for name, size in sizes.items()
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < least)
    ]
    if wrong:
        raise ValueError(f"{where}: {', '.join(wrong)}, expected an int, {least} or more")


class JaggedAttention(nn.Module):
    """Softmax or generalized attention with its bias tables; no projections.

    A recipe converts it by its precision for attention, each GEMM by name.

    Args:
        heads, head_dim: of q and k. value_dim: of a head of v; default head_dim.
        activation: `softmax`, or one of generalized attention, which takes its place.
        scale: of the scores; default `head_dim ** -0.5`. post_scale: of the output of generalized attention.
        causal, window: as `functional.jagged_attention` takes them.
        positions: rows of a bias table by relative position, 2 L - 1 for all within L tokens; 0: none.
        time_buckets: rows of a bias table by the logarithm of the time between two tokens; 0: none.

    Raises:
        ValueError, TypeError: for an argument that makes no layer.
    """

    time_bounds: Tensor | None

    def __init__(
        self,
        heads: int,
        head_dim: int,
        *,
        value_dim: int | None = None,
        activation: str = SOFTMAX,
        scale: float | None = None,
        post_scale: float = 1.0,
        causal: bool = False,
        window: int | None = None,
        positions: int = 0,
        time_buckets: int = 0,
    ) -> None:
        super().__init__()
        own = type(self).__name__
        check_sizes(own, heads=heads, head_dim=head_dim, value_dim=value_dim)
        check_sizes(own, 0, positions=positions, time_buckets=time_buckets)
        check_activation("activation", activation, (SOFTMAX, *ACTIVATIONS))
        check_mask(own, causal, window)
        check_numbers(own, post_scale=post_scale, **({} if scale is None else {"scale": scale}))
        if activation == SOFTMAX and post_scale != 1.0:
            raise ValueError(f"post_scale: got {post_scale} for softmax attention, expected 1.0: its rows sum to 1")
        self.heads, self.head_dim, self.value_dim = heads, head_dim, value_dim or head_dim
        self.activation, self.causal, self.window = activation, causal, window
        self.scale, self.post_scale = head_dim**-0.5 if scale is None else scale, post_scale
        self.position = nn.Parameter(torch.randn(positions, heads) * 0.02) if positions else None
        self.time = nn.Parameter(torch.randn(time_buckets, heads) * 0.02) if time_buckets else None
        bounds = log_time_bounds(time_buckets) if time_buckets else None
        self.register_buffer("time_bounds", bounds, persistent=False)

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_offsets: Tensor | None,
        k_offsets: Tensor,
        max_q: int,
        max_k: int,
        *,
        q_times: Tensor | None = None,
        k_times: Tensor | None = None,
        schedule: Tensor | None = None,
        broadcast_q: bool = False,
    ) -> Tensor:
        """As `functional.jagged_attention` or `functional.generalized_attention`: q (Tq, H, D) to (Tq, H, E)."""
        options: dict[str, Any] = {
            "bias": self.bias(q_times, k_times),
            "causal": self.causal,
            "window": self.window,
            "config": self.__dict__.get("mxfp8_config"),
            "schedule": schedule,
        }
        layout = (q_offsets, k_offsets, max_q, max_k)
        if self.activation != SOFTMAX:
            scales = {"pre_scale": self.scale, "post_scale": self.post_scale}
            activation = {"activation": self.activation, "broadcast_q": broadcast_q}
            return generalized_attention(q, k, v, *layout, **scales, **activation, **options)
        if broadcast_q:
            samples, length = k_offsets.shape[0] - 1, q.shape[0]
            begins = torch.arange(samples + 1, dtype=k_offsets.dtype, device=q.device) * length
            q, layout = q.repeat(samples, 1, 1), (begins, k_offsets, length, max_k)
        return jagged_attention(q, k, v, *layout, scale=self.scale, **options)  # pyright: ignore[reportArgumentType]

    def bias(self, q_times: Tensor | None, k_times: Tensor | None) -> JaggedBias | None:
        """The tables of this layer, with a batch's times."""
        if self.position is None and self.time is None:
            return None
        if self.time is None:
            return JaggedBias(position=self.position)
        bounds = self.time_bounds
        assert bounds is not None
        if bounds.device != self.time.device:  # a checkpoint assigned to a layer on meta has tables and no bounds
            bounds = self.time_bounds = log_time_bounds(len(self.time), device=self.time.device)
        if q_times is None or k_times is None:
            raise ValueError(
                f"{type(self).__name__}: got no times, expected some: it has a bias by time (time_buckets)"
            )
        return JaggedBias(position=self.position, time=self.time, q_times=q_times, k_times=k_times, time_bounds=bounds)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """`to`, `to_empty` and their like; bounds, which no checkpoint has, are made again where they were emptied."""
        super()._apply(fn, recurse)
        if self.time_bounds is not None and self.time is not None and not self.time_bounds.is_meta:
            self.time_bounds = log_time_bounds(len(self.time), device=self.time_bounds.device)
        return self

    def extra_repr(self) -> str:
        """Sizes, and what differs from plain softmax attention."""
        parts = [f"heads={self.heads}, head_dim={self.head_dim}, activation={self.activation}"]
        if self.value_dim != self.head_dim:
            parts.append(f"value_dim={self.value_dim}")
        parts += [
            f"{name}={value}" for name in ("causal", "window") if (value := getattr(self, name)) not in (None, False)
        ]
        return ", ".join(parts)


class MXFP8JaggedAttention(JaggedAttention):
    """`JaggedAttention` whose GEMMs run in MXFP8 per its config."""

    original_class: ClassVar[type[nn.Module]] = JaggedAttention
    mxfp8_config: AttentionConfig

    def extra_repr(self) -> str:
        """That of the layer, and the precision of each GEMM."""
        own = self.original_class.extra_repr(self)
        return f"{own}, {describe_attention(self.mxfp8_config)}"


def jagged_problem(module: JaggedAttention) -> str:
    """Why this layer cannot be converted, or nothing."""
    for name in ("head_dim", "value_dim"):
        if getattr(module, name) % BLOCK:
            return f"{name}={getattr(module, name)} is not a multiple of {BLOCK}"
    return ""
