"""Kernels as text: hand-written PTX templates with their Specs, the renderer, and naive CUDA C references."""
