"""How a step is cut: sequences into leaves and micro-batches, leaves into a tree; and the memory that takes."""

from __future__ import annotations

from ptxtrain.engine.activations import activation_bytes
from ptxtrain.engine.config import BatchConfig, Config
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.ops import gradnorm, scalars, state_digest
from ptxtrain.engine.parameters import matrix_count, parameter_count, parameter_table
from ptxtrain.engine.ways import resolve


def tree_depth(leaves: int) -> int:
    """The flat gradients that are alive at once: log2(leaves) + 1."""
    return leaves.bit_length()


def merges_after(leaf: int) -> int:
    """How many pairs are complete when this leaf is: one for each 1 at the low end of its number in binary."""
    return (leaf ^ (leaf + 1)).bit_length() - 1


def check_batch(batch: BatchConfig, micro_batch: int) -> None:
    """Hold a split against the rules.

    Raises: PtxtrainError: the leaves are no power of two or do not divide the sequences, or the micro-batch does not
        divide a leaf.
    """
    sequences, leaves = batch.sequences, batch.leaves
    if leaves < 1 or leaves & (leaves - 1):
        raise PtxtrainError(f"batch.leaves is {leaves}; it must be a power of two")
    if sequences < 1 or sequences % leaves:
        raise PtxtrainError(f"batch.sequences is {sequences}; it must be a multiple of batch.leaves ({leaves})")
    if micro_batch < 1 or (sequences // leaves) % micro_batch:
        raise PtxtrainError(
            f"a micro-batch of {micro_batch} sequences does not divide a leaf of {sequences // leaves} "
            f"({sequences} sequences in {leaves} leaves); choose a divisor of {sequences // leaves}"
        )


def memory_plan(config: Config, way: str, micro_batch: int | None = None) -> dict[str, int]:
    """The device memory that a `TrainStep` takes, in bytes by kind, before it is made.

    "leaves" are the gradients of the tree's stack and the embedding's second source, "scratch" what attention and the products
    of weights' gradients need in passing, "small" the step's numbers and partial sums.

    Raises:
        PtxtrainError: the way is unknown or the batch cannot be split so.
    """
    micro_batch = micro_batch or config.batch.micro_batch
    check_batch(config.batch, micro_batch)
    ways = resolve(config.model, way)
    table = parameter_table(config.model)
    count = parameter_count(table)
    activations = activation_bytes(config.model, micro_batch, ways, backward=True)
    scratch, logits = activations.pop("scratch"), activations.pop("logits")
    return {
        "weights": 4 * count,
        "weight copies": 2 * matrix_count(table) if ways.dtype == "bf16" else 0,
        "optimizer": 8 * count,
        "leaves": 4 * (tree_depth(config.batch.leaves) * (count + 1) + config.model.vocab_size * config.model.width),
        "activations": sum(activations.values()),
        "logits": logits,
        "scratch": scratch,
        "small": 4 * (scalars.COUNT + gradnorm.parts(count) + 1) + 8 + state_digest.scratch(count),
    }
