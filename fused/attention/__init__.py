"""Attention in MXFP8: its definition in plain torch, and kernels beside it."""
