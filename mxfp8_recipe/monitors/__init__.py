"""Numerics monitors: metrics in fp64, and the verdict over seeds, placebos and same-weights gates."""
