"""BF16 matrix products on a CPU, emulated: operands rounded to BF16, multiplied in FP32, the result rounded to BF16.

A CPU without BF16 instructions runs a BF16 matmul some 60 times slower than FP32, and CPUs that have them do not agree
on the bits. The emulation is as fast as FP32 plus its casts and the same everywhere. Backward follows from the casts:
autograd rounds where it casts, so every gradient product has BF16 operands, an FP32 sum and a BF16 result.

`emulate_bf16()` acts where CPU autocast to BF16 is on, and only on calls a model makes itself. What an MXFP8 op
multiplies inside is out of its sight (and has rounded or quantized operands already).
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_PRODUCTS: frozenset[Callable[..., Any]] = frozenset(
    {
        F.linear,
        F.bilinear,
        torch.matmul,
        torch.mm,
        torch.bmm,
        torch.mv,
        torch.addmm,
        torch.baddbmm,
        torch.addbmm,
        torch.einsum,
        torch.tensordot,
        torch.inner,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        Tensor.mm,
        Tensor.bmm,
        Tensor.mv,
        Tensor.addmm,
        Tensor.baddbmm,
        Tensor.addbmm,
        Tensor.inner,
        F.conv1d,
        F.conv2d,
        F.conv3d,
    }
)


def emulate_bf16() -> AbstractContextManager[Any]:
    """Context in which CPU autocast to BF16 multiplies as the module docstring says."""
    return _EmulatedBF16()


class _EmulatedBF16(TorchFunctionMode):
    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not _emulating():
            return func(*args, **kwargs)
        if func in _PRODUCTS and "out" not in kwargs and _autocasts((args, kwargs)):
            return _rounded(func, args, kwargs)
        if func is F.scaled_dot_product_attention and _autocasts((args, kwargs)):
            return _attention(*args, **kwargs)
        if func is F.multi_head_attention_forward:
            with self:
                return _transparent(func)(*args, **kwargs)
        return func(*args, **kwargs)


def _emulating() -> bool:
    return torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu") is torch.bfloat16


def _autocasts(values: Any) -> bool:
    """Whether autocast would cast these operands: CPU floats, none of them fp64; a mask is no operand."""
    operands = [t for t in _tensors(values) if t.dtype is not torch.bool]
    return bool(operands) and all(
        t.is_floating_point() and t.dtype is not torch.float64 and t.device.type == "cpu" for t in operands
    )


def _tensors(values: Any) -> Any:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(list(values.values()))


def _rounded(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch.autocast("cpu", enabled=False):
        return func(*_as_bf16_values(args), **_as_bf16_values(kwargs)).bfloat16()


def _as_bf16_values(value: Any) -> Any:
    """Every tensor rounded to BF16, held in FP32; the casts round its gradient on the way back."""
    if isinstance(value, Tensor):
        return value.bfloat16().float()
    if isinstance(value, list | tuple):
        return type(value)(_as_bf16_values(v) for v in value)
    if isinstance(value, dict):
        return {k: _as_bf16_values(v) for k, v in value.items()}
    return value


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(Q K^T * scale + mask) V: scores and softmax in FP32, P rounded to BF16 before the second product."""
    if enable_gqa:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (x.repeat_interleave(repeats, dim=-3) for x in (key, value))
    with torch.autocast("cpu", enabled=False):
        q, k, v = _as_bf16_values((query, key, value))
        scores = torch.matmul(q, k.transpose(-2, -1)) * (query.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
        if attn_mask is not None:
            masked = attn_mask.dtype is torch.bool
            scores = scores.masked_fill(~attn_mask, -torch.inf) if masked else scores + attn_mask.float()
        weights = torch.softmax(scores, dim=-1)
        if attn_mask is not None and attn_mask.dtype is torch.bool:
            weights = weights.masked_fill(~attn_mask.any(-1, keepdim=True), 0.0)
        weights = F.dropout(weights, dropout_p) if dropout_p else weights
        return torch.matmul(_as_bf16_values(weights), v).bfloat16()


def _transparent(func: Any) -> Callable[..., Any]:
    """`func`, a torch function in Python, without its first step of handing itself to the function mode.

    Its body then runs under the mode, which sees the products inside.
    """
    scope = {**func.__globals__, "has_torch_function": lambda tensors: False}
    copy = types.FunctionType(func.__code__, scope, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy
