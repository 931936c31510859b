"""Kernels: what Numba compiles. Nothing outside this package imports Numba."""
