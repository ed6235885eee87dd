"""What a run of a config will need, before it begins: memory, disk, operations, and the time by a short measurement."""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ptxtrain.data.loader import sort_rows
from ptxtrain.engine import init
from ptxtrain.engine.checkpoint import checkpoint_bytes
from ptxtrain.engine.config import Config, flops_per_token, parameter_count, to_dict, tokens_per_step
from ptxtrain.engine.device.base import Device
from ptxtrain.engine.leaves import memory_plan
from ptxtrain.engine.parameters import parameter_table
from ptxtrain.engine.preflight import checkpoints_at_once
from ptxtrain.engine.progress import FLOPS_FORMULA
from ptxtrain.engine.schedule import warmup_steps
from ptxtrain.engine.step import TrainStep
from ptxtrain.engine.ways import resolve

_CPU_FLOPS = 3e10  # a thread's, roughly: only chooses how much is measured
_LONGEST = 3.0  # seconds that a measured micro-batch should take at most
_STEPS = 3


def describe(config: Config) -> dict[str, Any]:
    """The resolved config and what a run of it needs: parameters, bytes of memory and disk, tokens, operations."""
    model, train = config.model, config.train
    memory = memory_plan(config, train.way)
    tokens = tokens_per_step(config)
    each, count = checkpoint_bytes(parameter_table(model)), checkpoints_at_once(train, train.steps)
    return {
        "config": to_dict(config),
        "ways": dataclasses.asdict(resolve(model, train.way)),
        "parameters": parameter_count(model),
        "memory": {**memory, "total": sum(memory.values())},
        "checkpoint_bytes": each,
        "checkpoints_at_once": count,
        "disk_bytes": each * count,
        "warmup_steps": warmup_steps(config.optimizer, tokens),
        "tokens_per_step": tokens,
        "tokens": tokens * train.steps,
        "flops_per_token": flops_per_token(model),
        "flops_formula": FLOPS_FORMULA,
        "flops": flops_per_token(model) * tokens * train.steps,
    }


@dataclass(frozen=True, slots=True)
class Estimate:
    """How long steps take, by a few that were run on random tokens."""

    device: str
    sequences: int  # in the micro-batch that was measured
    micro_batch_seconds: float  # forward and backward of it
    update_seconds: float  # the gradient norm and AdamW
    step_seconds: float
    seconds: float  # of all steps; validations, samples and saves come on top
    tokens_per_second: float
    flops_per_second: float


def estimate(config: Config, device: Device) -> Estimate:
    """Run a few micro-batches and updates, and reckon from them. Takes seconds, and what compiling the kernels takes.

    On a GPU a whole micro-batch is measured, on a CPU as many sequences of it as take a few seconds. Raises OutOfMemory as a run
    would.
    """
    batch, model = config.batch, config.model
    size = _measured_sequences(config, device)
    small = replace(config, batch=replace(batch, sequences=size, micro_batch=size, leaves=1))
    step = TrainStep(small, device)
    weights = init.initial_weights(model, config.train.seed)
    step.load(weights, np.zeros_like(weights), np.zeros_like(weights))
    text = np.random.default_rng(0).integers(0, model.vocab_size, (size, model.context + 1)).astype(np.int32)
    tokens, targets = np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:])
    order, starts = np.empty(tokens.size, np.int32), np.empty(model.vocab_size + 1, np.int32)
    sort_rows(tokens.reshape(-1), model.vocab_size, order, starts)
    times: list[tuple[float, float]] = []
    for number in range(1, _STEPS + 1):
        before = device.record()
        step.begin(tokens.size)
        step.micro_batch(0, tokens, targets, order, starts)
        between = device.record()
        result = step.finish(number, config.optimizer.lr)
        behind = device.record()
        result.wait()
        behind.wait()
        times.append((between.since(before), behind.since(between)))
        if number > 1 and sum(map(sum, times)) > 2 * _LONGEST:
            break
    micro, update = (statistics.median(column) for column in zip(*times[1:], strict=True))  # the first warms caches up
    seconds = micro * batch.sequences / size + update
    rate = tokens_per_step(config) / seconds
    return Estimate(
        device=device.name,
        sequences=size,
        micro_batch_seconds=micro,
        update_seconds=update,
        step_seconds=seconds,
        seconds=seconds * config.train.steps,
        tokens_per_second=rate,
        flops_per_second=rate * flops_per_token(model),
    )


def _measured_sequences(config: Config, device: Device) -> int:
    """As many as a micro-batch has, or on a CPU as many as do not take long."""
    most = config.batch.micro_batch
    if device.kind != "cpu":
        return most
    each = flops_per_token(config.model) * config.model.context / (_CPU_FLOPS * getattr(device, "threads", 1))
    return max(1, min(most, int(_LONGEST / each)))
