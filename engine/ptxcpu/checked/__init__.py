"""The checked mode of the CPU device: what compute-sanitizer does on a GPU.

Kernels are lowered with calls of native checks before each access, barrier and warp collective (`lower/checks.py`). The
checks themselves are IR made here once (`access`, `sync`, `copies`, written with `code`), over tables that Python keeps
(`state`, `memory`). What they find ends the launch and becomes one line (`report`).
"""
