"""The GPU backend: Triton kernels, launched straight through the CUDA driver."""
