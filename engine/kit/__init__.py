"""The training kit: the kernels as functions on the caller's own arrays; see `core` for where they run and what they take."""

from __future__ import annotations

from ptxtrain.engine.kit.attention import attention_backward, attention_forward
from ptxtrain.engine.kit.contracts import ContractError
from ptxtrain.engine.kit.core import on
from ptxtrain.engine.kit.cross_entropy import cross_entropy
from ptxtrain.engine.kit.fused import fused_layernorm_gemv, fused_rmsnorm_gemv
from ptxtrain.engine.kit.gemm import gemm
from ptxtrain.engine.kit.norms import layernorm_backward, layernorm_forward, rmsnorm_backward, rmsnorm_forward
from ptxtrain.engine.kit.optimizer import adamw_step
from ptxtrain.engine.kit.pointwise import swiglu_backward, swiglu_forward
from ptxtrain.engine.kit.rope import rope_backward, rope_forward, rope_tables
from ptxtrain.engine.kit.softmax import softmax_backward, softmax_forward

__all__ = [
    "ContractError",
    "adamw_step",
    "attention_backward",
    "attention_forward",
    "cross_entropy",
    "fused_layernorm_gemv",
    "fused_rmsnorm_gemv",
    "gemm",
    "layernorm_backward",
    "layernorm_forward",
    "on",
    "rmsnorm_backward",
    "rmsnorm_forward",
    "rope_backward",
    "rope_forward",
    "rope_tables",
    "softmax_backward",
    "softmax_forward",
    "swiglu_backward",
    "swiglu_forward",
]
