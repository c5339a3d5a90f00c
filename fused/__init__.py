"""Kernels and their reference. A leaf: imports torch and triton, knows no module and no recipe."""
