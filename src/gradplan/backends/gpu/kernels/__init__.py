"""What runs on the GPU. Importing any module of this package imports Triton."""
