"""Whether a kernel's result depends on the order in which blocks and warps run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.ptxcpu.checked.schedule import Schedule
from ptxtrain.engine.ptxcpu.module import Dim3, LoadedModule

ORDERS = ("forward", "reverse", "random:1", "random:2")


def check_orders(
    module: LoadedModule,
    entry: str,
    *,
    grid: Dim3,
    block: Dim3,
    args: Sequence[Any],
    shared: int = 0,
    orders: Sequence[str] = ORDERS,
) -> None:
    """Run a checked module's `entry` in several orders from the same arrays, and keep the first order's results.

    Module-scope variables go on from run to run.

    Raises:
        CheckError: a check failed in one of the orders.
        PtxtrainError: an order leaves other bits than the first; the first array and element that differ.
    """
    before = module.schedule
    assert before is not None, "the module is not in checked mode"
    arrays = [(i, a) for i, a in enumerate(args) if isinstance(a, np.ndarray)]
    initial = [a.copy() for _, a in arrays]
    expected: list[np.ndarray[Any, Any]] = []
    try:
        for order in orders:
            module.schedule = Schedule.parse(order)
            for (_, array), start in zip(arrays, initial, strict=True):
                if array.flags.writeable:
                    array[...] = start
            module.launch(entry, grid=grid, block=block, args=args, shared=shared)
            if order == orders[0]:
                expected = [a.copy() for _, a in arrays]
                continue
            for (number, array), first in zip(arrays, expected, strict=True):
                _compare(module, entry, number, order, orders[0], array, first)
    finally:
        module.schedule = before
        for (_, array), first in zip(arrays, expected, strict=False):
            if array.flags.writeable:
                array[...] = first


def _compare(
    module: LoadedModule, entry: str, number: int, order: str, usual: str,
    array: np.ndarray[Any, Any], first: np.ndarray[Any, Any],
) -> None:  # fmt: skip
    different = array.reshape(-1).view(np.uint8) != first.reshape(-1).view(np.uint8)
    if not different.any():
        return
    place = int(different.argmax()) // array.itemsize
    name = module.tree.entry(entry).params[number].name
    raise PtxtrainError(
        f"{entry} ({module.tree.path.name}): the result depends on the order of blocks and warps: {name}[{place}] is "
        f"{first.reshape(-1)[place]!r} in {usual} order, {array.reshape(-1)[place]!r} in {order} order"
    )
