"""Which callable runs each op on each backend, and the torch custom ops in front of them."""

from .epilogues import PLAIN, gemm_dact, gemm_epilogue
from .gemm import gemm, matmul, quantize, quantize_and_sum
from .library import decode, define
from .producers import activation_backward, activation_quantize, norm_backward, norm_quantize
from .table import BACKENDS, BackendStatus, choose, describe, has, ops, plain, resolve, select

__all__ = [
    "BACKENDS",
    "PLAIN",
    "BackendStatus",
    "activation_backward",
    "activation_quantize",
    "choose",
    "decode",
    "define",
    "describe",
    "gemm",
    "gemm_dact",
    "gemm_epilogue",
    "has",
    "matmul",
    "norm_backward",
    "norm_quantize",
    "ops",
    "plain",
    "quantize",
    "quantize_and_sum",
    "resolve",
    "select",
]
