"""The functional API: MXFP8 counterparts of `torch.nn.functional`, with autocast and checks, without modules.

Each op also takes and gives the values of `mx_tensor` and `mx_heads` that travel between fused layers.
"""

from ..backends.offsets import check_offsets
from ..fused.attention.bias import JaggedBias, log_time_bounds
from .attention import mxfp8_attention
from .common import compute_dtype, draw_seed
from .epilogue import mxfp8_activated_linear, mxfp8_awaited_linear
from .jagged import block_attention, generalized_attention, jagged_attention, jagged_schedule
from .linear import mxfp8_linear, mxfp8_projection
from .producers import activation, mxfp8_activation, mxfp8_norm, pending

__all__ = [
    "JaggedBias",
    "activation",
    "block_attention",
    "check_offsets",
    "compute_dtype",
    "draw_seed",
    "generalized_attention",
    "jagged_attention",
    "jagged_schedule",
    "log_time_bounds",
    "mxfp8_activated_linear",
    "mxfp8_activation",
    "mxfp8_attention",
    "mxfp8_awaited_linear",
    "mxfp8_linear",
    "mxfp8_norm",
    "mxfp8_projection",
    "pending",
]
