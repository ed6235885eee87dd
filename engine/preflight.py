"""Before the first step: a micro-batch that fits the memory, and disk enough for the checkpoints that will be kept.

The micro-batch does not show in the result, so one that does not fit is halved until it does, and the run says so.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable
from dataclasses import replace

from ptxtrain.engine.checkpoint import checkpoint_bytes, list_steps
from ptxtrain.engine.config import BatchConfig, Config, TrainConfig, allowed_micro_batches
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.errors import OutOfMemory, PtxtrainError
from ptxtrain.engine.leaves import memory_plan
from ptxtrain.engine.memory import host_free, size
from ptxtrain.engine.parameters import parameter_count, parameter_table
from ptxtrain.engine.rundir import RunDirectory
from ptxtrain.engine.step import TrainStep


def halved(batch: BatchConfig) -> BatchConfig | None:
    """The batch with the largest micro-batch that is at most half of this one's; None where that is 1 already."""
    smaller = [size for size in allowed_micro_batches(batch) if 2 * size <= batch.micro_batch]
    return replace(batch, micro_batch=smaller[-1]) if smaller else None


def missing(config: Config, device: Device) -> str | None:
    """Why a run of this config does not fit the memory that is free, in one clause; None if it does, or if nobody knows."""
    needed = sum(memory_plan(config, config.train.way).values())
    state = 12 * parameter_count(parameter_table(config.model))  # the host's copy of a state while it is saved
    on_host = state + (needed if device.kind == "cpu" else 0)
    for what, free, bytes_ in (
        (device.name, device.free_memory(), needed),
        ("the host", host_free(), on_host),
    ):
        if free is not None and bytes_ > free:
            return f"{size(bytes_)} ({bytes_:,} bytes) are needed on {what} and {size(free)} are free"
    return None


def make_step(config: Config, device: Device, note: Callable[[str], None]) -> tuple[Config, TrainStep]:
    """The step, and the config with the micro-batch that it was made for: the config's own, or the next smaller one that fits.

    Raises:
        PtxtrainError: not even a single sequence fits; it names the bytes needed.
    """
    while True:
        why = missing(config, device)
        if why is None:
            try:
                return config, TrainStep(config, device)
            except (OutOfMemory, MemoryError) as error:
                why = str(error) or "the host has no memory left"
            device.synchronize()
            gc.collect()  # what had been allocated hangs together in circles
        batch, smaller = config.batch, halved(config.batch)
        if smaller is None:
            raise PtxtrainError(
                f"not enough memory for micro-batches of one sequence: {why}. Free some, or take a smaller model or context"
            )
        note(
            f"memory: a micro-batch of {batch.micro_batch} sequences does not fit: {why}; going on with {smaller.micro_batch}, "
            "which gives the same bits"
        )
        config = replace(config, batch=smaller)


def checkpoints_at_once(train: TrainConfig, last: int) -> int:
    """How many checkpoints of a run to step `last` lie on the disk at most: those kept, the best one, and one being written."""
    saves = 1 + (last // train.save_every if train.save_every else (last if train.save_minutes else 0))
    for_good = last // train.keep_every if train.keep_every else 0
    return min(train.keep + 1 + for_good, saves) + 1


def check_disk(run: RunDirectory, config: Config, last: int, note: Callable[[str], None]) -> None:
    """Hold the disk's free space against what the run will keep on it.

    Raises:
        PtxtrainError: there is less. Only for a run that has nothing to lose yet; one with a checkpoint goes on, and is told.
    """
    each, count = checkpoint_bytes(parameter_table(config.model)), checkpoints_at_once(config.train, last)
    have = len(list_steps(run.path))
    needed = each * max(count - have, 1)
    try:
        free = shutil.disk_usage(run.path).free
    except OSError:
        return
    if free >= needed:
        return
    line = (
        f"not enough disk at {run.path}: {max(count - have, 1)} more checkpoints of {size(each)} take {size(needed)} "
        f"({needed:,} bytes), and {size(free)} are free. Free some, use another --run, or keep fewer (--set train.keep=2)"
    )
    if not have:
        raise PtxtrainError(line)
    note(line)
