"""Devices: where kernels run. `base` is the protocol, `cuda` runs on a GPU through CuPy, `cpu` through `ptxcpu`."""
