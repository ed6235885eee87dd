"""Naive CUDA C references, compiled by NVRTC."""
