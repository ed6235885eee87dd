"""The numbers that change every step: indices into one f32 buffer of `COUNT` that kernels read and write."""

from __future__ import annotations

from ptxtrain.ptx import specs

LR = specs.LR
BIAS1 = specs.BIAS1  # 1 - beta1^t
BIAS2 = specs.BIAS2  # 1 - beta2^t
GRAD_SCALE = specs.GRAD_SCALE  # 1 / targets in the whole step
CLIP = specs.CLIP  # what AdamW multiplies gradients with
GRAD_NORM = specs.GRAD_NORM
LOSS = specs.LOSS
COUNT = specs.SCALARS
