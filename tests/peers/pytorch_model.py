"""The model in PyTorch, as one would write it there: `nn.Linear`, `rms_norm`, `scaled_dot_product_attention`, `cross_entropy`.

It takes our flat weights and gives gradients in the same layout. Under `torch.autocast` products and attention run in bf16
and the residual stream stays f32, as in our way `fast`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ptxtrain.engine.config import Config, ModelConfig, OptimizerConfig
from ptxtrain.engine.ops import rope
from ptxtrain.engine.parameters import parameter_table

F32 = npt.NDArray[np.float32]
I32 = npt.NDArray[np.int32]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, T, heads, C]: pairs (k, k + C/2) turned by the angle of their position; cos, sin [T, 1, C/2]."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        heads_width = cfg.heads * cfg.head_dim
        self.attention_norm = nn.RMSNorm(cfg.width, cfg.norm_eps)
        self.qkv = nn.Linear(cfg.width, heads_width + 2 * cfg.kv_heads * cfg.head_dim, bias=False)
        self.attention_out = nn.Linear(heads_width, cfg.width, bias=False)
        self.mlp_norm = nn.RMSNorm(cfg.width, cfg.norm_eps)
        self.gate_up = nn.Linear(cfg.width, 2 * cfg.mlp_width, bias=False)
        self.mlp_down = nn.Linear(cfg.mlp_width, cfg.width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cfg = self.cfg
        batch, context, _ = x.shape
        qkv = self.qkv(self.attention_norm(x)).view(batch, context, cfg.heads + 2 * cfg.kv_heads, cfg.head_dim)
        q, k, v = qkv.split([cfg.heads, cfg.kv_heads, cfg.kv_heads], 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=cfg.heads != cfg.kv_heads,
        )
        x = x + self.attention_out(out.transpose(1, 2).reshape(batch, context, -1))
        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, -1)
        return x + self.mlp_down(F.silu(gate) * up)


class Llama(nn.Module):
    """See the module's text. `forward` gives the mean loss over the targets that are not below 0."""

    cos: Tensor
    sin: Tensor

    def __init__(self, cfg: ModelConfig) -> None:
        super().__init__()
        self.cfg = cfg
        self.embedding = nn.Embedding(cfg.vocab_size, cfg.width)
        self.layers = nn.ModuleList(Layer(cfg) for _ in range(cfg.layers))
        self.final_norm = nn.RMSNorm(cfg.width, cfg.norm_eps)
        for name, table in zip(("cos", "sin"), rope.tables(cfg.context, cfg.head_dim, cfg.rope_base), strict=True):
            self.register_buffer(name, torch.from_numpy(table)[:, None, :], persistent=False)

    def forward(
        self,
        tokens: Tensor,  # [B, T] int64
        targets: Tensor,  # [B, T] int64, -1: ignored
    ) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        logits = F.linear(self.final_norm(x), self.embedding.weight)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def tensors(self) -> list[tuple[nn.Parameter, bool]]:
        """Each parameter in our table's order, and whether it lies transposed here ([outputs, inputs])."""
        named = {name.removesuffix(".weight"): p for name, p in self.named_parameters()}
        return [(named[t.name], t.decay and t.name != "embedding") for t in parameter_table(self.cfg)]

    def load_flat(self, flat: F32) -> None:
        """Set the parameters from ours."""
        with torch.no_grad():
            for t, (p, transposed) in zip(parameter_table(self.cfg), self.tensors(), strict=True):
                ours = torch.from_numpy(flat[t.offset : t.offset + t.size].reshape(t.shape))
                p.copy_(ours.T if transposed else ours)

    def flat(self, *, gradient: bool = False) -> F32:
        """The parameters, or their gradients, in our layout."""
        parts = []
        for p, transposed in self.tensors():
            values = p.grad if gradient else p.detach()
            assert values is not None
            parts.append((values.T if transposed else values).float().cpu().numpy().ravel())
        return np.concatenate(parts)


def optimizer(model: Llama, opt: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW as we have it: decay on matrices alone; PyTorch's fused kernel."""
    matrices = [p for p in model.parameters() if p.ndim == 2]
    norms = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": opt.weight_decay}, {"params": norms, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=opt.lr, betas=(opt.beta1, opt.beta2), eps=opt.eps, fused=True)


def training_step(
    config: Config,
    weights: F32,  # [parameters], ours
    tokens: I32,  # [S, T]
    targets: I32,  # [S, T], -1: ignored
    *,
    device: str = "cpu",  # PyTorch's
    bf16: bool,
    compiled: bool,
    micro_batch: int | None = None,  # sequences at a time; None: all
) -> Callable[[], float]:
    """A function that takes a whole step on the batch, clip and update included, and gives the loss before it."""
    model = Llama(config.model).to(device)
    model.load_flat(weights)
    update = optimizer(model, config.optimizer)
    size = micro_batch or len(tokens)
    parts = [
        [torch.from_numpy(array[i : i + size]).long().to(device) for array in (tokens, targets)]
        for i in range(0, len(tokens), size)
    ]
    kept = [int((part[1] >= 0).sum()) for part in parts]
    loss_of: Callable[[Tensor, Tensor], Tensor] = torch.compile(model) if compiled else model

    def step() -> float:
        losses = []
        for (x, y), count in zip(parts, kept, strict=True):
            with torch.autocast(device, torch.bfloat16, enabled=bf16):
                loss = loss_of(x, y) * (count / sum(kept))
            loss.backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.clip)
        update.step()
        update.zero_grad(set_to_none=True)
        return float(sum(losses))

    return step
