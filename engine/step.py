"""One training step: micro-batches forward and backward, the tree of leaves, the gradient norm and AdamW.

A step's S sequences fall into leaves. A leaf's gradient starts at zero and takes its rows in order, whatever the
micro-batches they come in. Leaves are then added as a balanced binary tree of neighbours, ((0 + 1) + (2 + 3)) + ((4 +
5) + (6 + 7)): a leaf is computed on top of a stack of log2(leaves) + 1 flat gradients, and is added down whenever a
pair is complete. The loss lies behind the gradient in the same buffer, so it goes along the same tree.

Everything is queued. `StepResult.wait` is the only thing that waits in a training loop, best one step late.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

import numpy as np

from ptxtrain.engine import init
from ptxtrain.engine.config import Config
from ptxtrain.engine.decode import Decoder
from ptxtrain.engine.device.base import Device, Plan
from ptxtrain.engine.errors import PtxtrainError
from ptxtrain.engine.inference import Inference
from ptxtrain.engine.init import F32
from ptxtrain.engine.kernels import Override, Recorder
from ptxtrain.engine.leaves import memory_plan, merges_after, tree_depth
from ptxtrain.engine.model import I32, Gradient, Model, Weights
from ptxtrain.engine.ops import adamw, add, cast, gradnorm, scalars, state_digest
from ptxtrain.engine.parameters import Flat, matrix_count, parameter_count, parameter_table
from ptxtrain.engine.staging import Staging, StateCopy, StepResult, joined
from ptxtrain.engine.ways import resolve

__all__ = ["StepResult", "TrainStep", "memory_plan"]

_AHEAD = 2  # steps whose host buffers are apart: one may run while the next is queued


class TrainStep:
    """Weights, AdamW's state and the plans of a step. See the module's text and each method.

    A step is `begin`, `micro_batch` 0 … S/B - 1, `finish`. Host arrays that are passed in may be reused at once, but for
    those of `buffers`, which the device reads itself: they must stay as they are until the step has ended. After
    `Device.interrupt` and `synchronize` a step that had not come to `finish` has changed nothing: `begin` starts it
    over.
    """

    def __init__(
        self,
        config: Config,
        device: Device,
        *,
        way: str | None = None,
        micro_batch: int | None = None,
        overrides: Mapping[str, Override] | None = None,
    ) -> None:
        """Take all memory and make the plans. `way` and `micro_batch` default to the config's.

        `overrides` are kernel texts by stem that stand in for the shipped ones.

        Raises:
            PtxtrainError: an impossible batch split, an unknown way, or a shape that a kernel does not take.
        """
        self.config, self.device = config, device
        self.way = way or config.train.way
        self.micro_size = micro_batch or config.batch.micro_batch
        self.ways = resolve(config.model, self.way)
        self._memory = memory_plan(config, self.way, self.micro_size)
        self._overrides = dict(overrides or {})
        self.table = parameter_table(config.model)
        self.count = parameter_count(self.table)
        self.micro_batches = config.batch.sequences // self.micro_size
        self._take_memory()
        self.model = Model(
            config.model,
            device,
            self._weights,
            micro_batch=self.micro_size,
            way=self.way,
            z_loss=config.train.z_loss,
        )
        self._record()
        self._staging = [
            Staging(device, self.micro_batches, self.model.rows, config.model.vocab_size) for _ in range(_AHEAD)
        ]
        self._pinned_rows = {address for staging in self._staging for address in staging.rows()}
        self._spare: tuple[F32, F32, F32] | None = None  # host memory for the next copy of the state
        self._turn = 0  # which staging
        self._next: int | None = None  # the micro-batch that comes next; None between steps
        self._targets = 0
        self._inference: Inference | None = None
        self._decoder: Decoder | None = None

    def _take_memory(self) -> None:
        config, device, count = self.config, self.device, self.count
        self.params, self.m, self.v = (device.alloc(4 * count) for _ in range(3))
        f32 = Flat(self.params, self.table, 4)
        self._matrices = matrix_count(self.table)
        self._copies = device.alloc(2 * self._matrices) if self.ways.dtype == "bf16" else None
        self._weights = Weights(f32, f32 if self._copies is None else Flat(self._copies, self.table, 2))
        gather = device.alloc(4 * config.model.vocab_size * config.model.width)
        self._stack = []
        for _ in range(tree_depth(config.batch.leaves)):
            flat = device.alloc(4 * (count + 1))
            self._stack.append(Gradient(Flat(flat, self.table, 4), gather, flat.view(4 * count, 4)))
        self._scalars = device.alloc(4 * scalars.COUNT)
        self._norm_partial = device.alloc(4 * gradnorm.parts(count))
        self._validation_loss = device.alloc(4)
        self._state_sum = device.alloc(8)
        self._state_sums = device.alloc(state_digest.scratch(count))
        device.fill(self._scalars, 0)

    def _record(self) -> None:
        """Every plan: a micro-batch at each height of the stack, the end of each leaf, the update, validation."""
        rec, model = Recorder(self.device, overrides=self._overrides), self.model
        self._micro_plans: list[Plan] = []
        for gradient in self._stack:
            model.record_forward(rec)
            model.record_head(rec, gradient.loss, gradient, self._scalars)
            model.record_backward(rec, gradient)
            self._micro_plans.append(rec.plan())
        self._leaf_plans: list[Plan] = []
        for leaf in range(self.config.batch.leaves):
            self._record_leaf_end(rec, leaf)
            self._leaf_plans.append(rec.plan())
        model.record_forward(rec)
        model.record_head(rec, self._validation_loss)
        self._validation_plan = rec.plan()
        self._record_update(rec)
        self._update_plan = rec.plan()
        self._record_state_sum(rec)
        self._state_sum_plan = rec.plan()
        self._copy_plan: Plan | None = None
        if self._copies is not None:
            cast.to_bf16(rec, self._copies, self.params, count=self._matrices)
            self._copy_plan = rec.plan()

    def _record_leaf_end(self, rec: Recorder, leaf: int) -> None:
        """Join the embedding's two gradients, then add down each pair that this leaf completes."""
        height = leaf.bit_count()
        gradient = self._stack[height]
        table = gradient.flat["embedding"]
        add.into(rec, table, table, gradient.gather, count=self.config.model.vocab_size * self.config.model.width)
        for _ in range(merges_after(leaf)):
            upper, lower = self._stack[height].flat.buffer, self._stack[height - 1].flat.buffer
            add.into(rec, lower, lower, upper, count=self.count + 1)
            height -= 1

    def _record_update(self, rec: Recorder) -> None:
        """The norm of the whole gradient, then AdamW: matrices decay and leave bf16 copies, norm weights do neither."""
        opt, gradient, loss = self.config.optimizer, self._stack[0].flat.buffer, self._stack[0].loss
        gradnorm.compute(rec, self._scalars, self._norm_partial, gradient, loss, count=self.count, clip=opt.clip)
        for first, count, decay, copy in (
            (0, self._matrices, opt.weight_decay, self._copies),
            (self._matrices, self.count - self._matrices, 0.0, None),
        ):
            params, m, v, grads = (
                buffer.view(4 * first, 4 * count) for buffer in (self.params, self.m, self.v, gradient)
            )
            adamw.update(
                rec,
                params,
                m,
                v,
                copy,
                grads,
                self._scalars,
                count=count,
                beta1=opt.beta1,
                beta2=opt.beta2,
                eps=opt.eps,
                decay=decay,
            )

        self._record_state_sum(rec)

    def _record_state_sum(self, rec: Recorder) -> None:
        """After each update: 1.1 ms of a step of `tiny` on two cores, and what a step did is known to the bit."""
        state_digest.compute(rec, self._state_sum, self._state_sums, self.params, self.m, self.v, count=self.count)

    # State in and out.

    def initialise(self, seed: int) -> None:
        """Fresh weights for this seed, m and v zero."""
        zero = np.zeros(self.count, np.float32)
        self.load(init.initial_weights(self.config.model, seed), zero, zero)

    def load(
        self,
        params: F32,  # [parameters], as are m and v
        m: F32,
        v: F32,
    ) -> None:
        """Set the whole state. Waits."""
        for buffer, values in ((self.params, params), (self.m, m), (self.v, v)):
            assert values.dtype == np.float32 and values.shape == (self.count,), (values.dtype, values.shape)
            self.device.upload(buffer, np.ascontiguousarray(values))
        if self._copy_plan is not None:
            self.device.run(self._copy_plan)
        self.device.synchronize()

    def snapshot(self) -> tuple[F32, F32, F32]:
        """Copies of the parameters, m and v, each f32 [parameters]. Waits."""
        return self.begin_snapshot().wait()

    def state_sum(self) -> int:
        """`engine.digest.state_sum` of what the device holds now, computed there. Waits."""
        self.device.run(self._state_sum_plan)
        return joined(self.device.read(self._state_sum, np.uint32, (2,)))

    def prepare_snapshot(self) -> None:
        """Take host memory for `begin_snapshot` ahead, and touch it: the pages of 16 MB cost 40 ms, copying into them 4."""
        if self._spare is None:
            params, m, v = (self.device.pinned(4 * self.count).view(np.float32) for _ in range(3))
            for array in (params, m, v):
                array.fill(0)
            self._spare = params, m, v

    def begin_snapshot(self) -> StateCopy:
        """Queue copies of the parameters, m and v as they are behind what is queued so far. The host goes on at once, and
        so does the device once it has copied."""
        device = self.device
        self.prepare_snapshot()
        assert self._spare is not None
        (params, m, v), self._spare = self._spare, None
        for values, buffer in ((params, self.params), (m, self.m), (v, self.v)):
            device.download(values, buffer)
        return StateCopy(device.record(), (params, m, v))

    # A step.

    def buffers(self) -> list[tuple[I32, I32, I32, I32]]:
        """Pinned host memory for the input of steps in turn: tokens and targets [S, T], order [M, N], starts [M, V + 1]."""
        shape = (self.config.batch.sequences, self.config.model.context)
        return [(one.tokens.reshape(shape), one.targets.reshape(shape), one.order, one.starts) for one in self._staging]

    def begin(self, targets: int) -> None:
        """Start a step that has `targets` targets in all (those that are not ignored): gradients are scaled by 1 /
        targets.

        Raises:
            PtxtrainError: there is no target.
        """
        if targets < 1:
            raise PtxtrainError("a step has no target to learn from: every one is ignored; check the data")
        if self._next is not None:
            self.device.synchronize()  # a step was abandoned: its copies may still read this staging
        staging = self._staging[self._turn]
        if staging.result is not None:
            staging.result.wait()  # keeps the values; from here on the memory is free
        staging.scalars[scalars.GRAD_SCALE] = 1.0 / targets
        self._upload_scalars(staging, scalars.GRAD_SCALE, 1)
        self._targets, self._next = targets, 0

    def micro_batch(
        self,
        index: int,  # 0 … S/B - 1, in order
        tokens: I32,  # [B, T]
        targets: I32,  # [B, T], below 0: ignored
        order: I32,  # [N] rows sorted by token, stable
        starts: I32,  # [V + 1] rows of token t are order[starts[t]:starts[t + 1]]
    ) -> None:
        """Queue one micro-batch forward and backward, and what ends with it: a leaf, pairs of the tree."""
        assert index == self._next, (index, self._next)
        device, staging, model = self.device, self._staging[self._turn], self.model
        per_leaf = self.micro_batches // self.config.batch.leaves
        leaf, within = divmod(index, per_leaf)
        for name, host, values in (
            ("tokens", staging.tokens, tokens),
            ("targets", staging.targets, targets),
            ("order", staging.order, order),
            ("starts", staging.starts, starts),
        ):
            source = values.reshape(-1)
            if source.ctypes.data not in self._pinned_rows:
                host[index] = source
                source = host[index]
            device.upload(model[name], source)
        height = leaf.bit_count()
        if within == 0:
            device.fill(self._stack[height].flat.buffer, 0)
            device.fill(self._stack[height].gather, 0)
        device.run(self._micro_plans[height])
        if within == per_leaf - 1:
            device.run(self._leaf_plans[leaf])
        self._next = index + 1

    def finish(
        self,
        step: int,  # from 1: AdamW's t
        lr: float,
    ) -> StepResult:
        """Queue the gradient norm, the update and the copies back."""
        assert self._next == self.micro_batches and step >= 1, (self._next, step)
        device, staging, opt = self.device, self._staging[self._turn], self.config.optimizer
        staging.scalars[scalars.LR] = lr
        staging.scalars[scalars.BIAS1] = 1.0 - opt.beta1**step
        staging.scalars[scalars.BIAS2] = 1.0 - opt.beta2**step
        for which in (scalars.LR, scalars.BIAS1, scalars.BIAS2):
            self._upload_scalars(staging, which, 1)
        device.run(self._update_plan)
        device.download(staging.back[: scalars.COUNT], self._scalars)
        device.download(staging.back[scalars.COUNT :], self._stack[0].loss)
        device.download(staging.state_sum, self._state_sum)
        result = StepResult(device.record(), staging.back, staging.state_sum, self._targets)
        staging.result = result
        self._turn = (self._turn + 1) % _AHEAD
        self._next = None
        return result

    def _upload_scalars(self, staging: Staging, first: int, count: int) -> None:
        self.device.upload(self._scalars.view(4 * first, 4 * count), staging.scalars[first : first + count])

    def gradient(self) -> F32:
        """The step's gradient once its last micro-batch is queued, f32 [parameters]. Waits."""
        assert self._next == self.micro_batches
        values: F32 = self.device.read(self._stack[0].flat.buffer, np.float32, (self.count,))
        return values

    # Forward only.

    def evaluate(
        self,
        tokens: I32,  # [b, T], b <= B
        targets: I32,  # [b, T]
    ) -> tuple[float, int]:
        """The sum of the losses in nats and the number of targets. Waits."""
        self._forward(tokens, targets)
        total = self.device.read(self._validation_loss, np.float32, (1,))
        return float(total[0]), int(np.count_nonzero(targets >= 0))

    def row_losses(
        self,
        tokens: I32,  # [b, T], b <= B
        targets: I32,  # [b, T]
        stopping: Callable[[], bool] | None = None,
    ) -> F32:
        """The loss of each row, f32 [b, T], 0 where the target is ignored. Waits; f32 [0, T] once `stopping` says so."""
        if not self._forward(tokens, targets, stopping):
            return np.empty((0, self.config.model.context), np.float32)
        losses: F32 = self.device.read(self.model["loss"], np.float32, (self.micro_size, self.config.model.context))
        return losses[: tokens.shape[0]]

    def _forward(self, tokens: I32, targets: I32, stopping: Callable[[], bool] | None = None) -> bool:
        """Run the validation plan over at most B sequences, and wait; those missing are made of ignored targets.

        False: `stopping` said so before it ended, and it was interrupted.
        """
        assert tokens.shape == targets.shape and tokens.shape[1] == self.config.model.context, tokens.shape
        sequences = tokens.shape[0]
        assert 1 <= sequences <= self.micro_size, (sequences, self.micro_size)
        shape = (self.micro_size, self.config.model.context)
        all_tokens, all_targets = np.zeros(shape, np.int32), np.full(shape, -1, np.int32)
        all_tokens[:sequences], all_targets[:sequences] = tokens, targets
        self.device.upload(self.model["tokens"], all_tokens)
        self.device.upload(self.model["targets"], all_targets)
        self.device.fill(self._validation_loss, 0)
        self.device.run(self._validation_plan)
        finished = stopping is None or self._unless(stopping)
        self.device.synchronize()  # the arrays above may go
        return finished

    def _unless(self, stopping: Callable[[], bool]) -> bool:
        """Wait for what is queued, unless `stopping` says so first: then interrupt it."""
        event, pause = self.device.record(), 1e-4
        while not event.done():
            if stopping():
                self.device.interrupt()
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.01)
        return True

    def logits(
        self,
        tokens: I32,  # [1, t], 1 <= t <= T
    ) -> F32:
        """The logits that follow the last token, f32 [V]. Waits. The memory for it is taken on first use."""
        if self._inference is None:
            self._inference = Inference(
                self.config.model, self.device, self._weights, way=self.way, overrides=self._overrides
            )
        return self._inference.logits(tokens)

    def decoder(self) -> Decoder:
        """One text that grows token by token, over the weights as they are. The memory for it is taken on first use.

        After an update a text must be read anew: what is kept of it comes from the weights before.
        """
        if self._decoder is None:
            self._decoder = Decoder(
                self.config.model, self.device, self._weights, way=self.way, overrides=self._overrides
            )
        return self._decoder

    def memory(self) -> dict[str, int]:
        """Bytes of device memory by kind."""
        return dict(self._memory)
