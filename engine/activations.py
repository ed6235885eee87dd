"""The memory of one micro-batch: every buffer's size, from the configuration alone, so that a run can be planned up front."""

from __future__ import annotations

from ptxtrain.engine.config import ModelConfig
from ptxtrain.engine.ops import attention, flash_attention, matmul, rmsnorm
from ptxtrain.engine.parameters import parameter_table
from ptxtrain.engine.ways import Ways

LOGITS_CAP = 256 << 20  # bytes: the head runs in chunks of whole sequences whose logits stay below it


def head_sequences(cfg: ModelConfig, micro_batch: int, itemsize: int) -> int:
    """How many sequences the head takes at a time."""
    return max(1, min(micro_batch, LOGITS_CAP // (cfg.context * cfg.vocab_size * itemsize)))


def activation_bytes(
    cfg: ModelConfig,
    micro_batch: int,
    ways: Ways,
    *,
    backward: bool,
) -> dict[str, int]:
    """Every buffer of a model but its weights, by name, in bytes. `layers.{i}.…` repeat.

    Without `backward` the layers share theirs, and there is none for the head: whoever reads on takes one row's logits.
    """
    item, rows, width = ways.item, micro_batch * cfg.context, cfg.width
    heads_width = cfg.heads * cfg.head_dim
    qkv_width = heads_width + 2 * cfg.kv_heads * cfg.head_dim
    sizes = {
        "tokens": rows * 4,
        "cos": cfg.context * (cfg.head_dim // 2) * 4,
        "sin": cfg.context * (cfg.head_dim // 2) * 4,
        "x": rows * width * 4,  # the residual stream as it enters the final norm
        "rstd": rows * 4,
        "final": rows * width * item,
        "scratch": scratch_bytes(cfg, micro_batch, ways, backward=backward),
    }
    for i in range(cfg.layers if backward else 1):
        layer = {
            "x": rows * width * 4,
            "rstd_1": rows * 4,
            "normed_1": rows * width * item,
            "qkv": rows * qkv_width * item,
            "attention": rows * heads_width * item,
            "attention_lse": rows * cfg.heads * 4,
            "middle": rows * width * 4,  # the residual stream between attention and MLP
            "rstd_2": rows * 4,
            "normed_2": rows * width * item,
            "gate_up": rows * 2 * cfg.mlp_width * item,
            "mlp": rows * cfg.mlp_width * item,
        }
        sizes |= {f"layers.{i}.{name}": size for name, size in layer.items()}
    if backward:
        sizes |= {
            "targets": rows * 4,
            "logits": head_sequences(cfg, micro_batch, item) * cfg.context * cfg.vocab_size * item,
            "lse": rows * 4,
            "loss": rows * 4,
            "order": rows * 4,
            "starts": (cfg.vocab_size + 1) * 4,
            "norm_partial": rmsnorm.parts(rows, cfg.context) * width * 4,
            "d_x": rows * width * 4,  # gradient of the residual stream
            "d_branch": rows * width * item,  # the same as the matmuls read it, rounded to bf16 in that way
            "d_normed": rows * width * item,
            "d_qkv": rows * qkv_width * item,
            "d_attention": rows * heads_width * item,
            "d_gate_up": rows * 2 * cfg.mlp_width * item,
            "d_mlp": rows * cfg.mlp_width * item,
        }
        if ways.base == "f32":
            del sizes["d_branch"]  # the residual gradient itself
    return sizes


def scratch_bytes(cfg: ModelConfig, micro_batch: int, ways: Ways, *, backward: bool) -> int:
    """What attention and the gradients of weights need while they run, one after the other."""
    sizes = {"batch": micro_batch, "context": cfg.context, "heads": cfg.heads}
    most = [4]
    if ways.attention != "fast":
        most.append(attention.scratch_bytes(**sizes))
    elif backward:
        most.append(flash_attention.delta_bytes(**sizes))
    if ways.matmul == "fast" and backward:
        most += [
            matmul.partial_bytes(*tensor.shape, sequences=micro_batch, context=cfg.context)
            for tensor in parameter_table(cfg)
            if tensor.decay and tensor.name != "embedding"
        ]
        largest = head_sequences(cfg, micro_batch, ways.item)
        most.append(matmul.partial_bytes(cfg.vocab_size, cfg.width, sequences=largest, context=cfg.context))
    return max(most)
