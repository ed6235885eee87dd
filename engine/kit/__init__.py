"""The training kit: the kernels as functions on the caller's own arrays; see `core` for where they run and what they take."""

from __future__ import annotations

from ptxtrain.engine.kit.contracts import ContractError
from ptxtrain.engine.kit.core import on

__all__ = ["ContractError", "on"]
