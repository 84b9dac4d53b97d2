"""The presets' models, written as programs for a Tape: see `operators` for what each step costs.

A program is a model's forward, in the order and with the variables of a usual implementation in
PyTorch. `Execution` says with which kernels it runs. Nothing here is a formula: what a block
saves, and what it holds for a moment, comes out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from course_lib.comm.units import HEAD
from course_lib.ledger import losses
from course_lib.ledger import operators as op
from course_lib.ledger.blocks import BLOCKS, llama_block
from course_lib.ledger.execution import Execution
from course_lib.ledger.tape import ACTIVATIONS, LOGITS, Storage, Tape, Tensor
from course_lib.specs import ModelSpec

BF16 = 2


STEMS = {
    "gpt2": ("transformer", "wte", "h", "ln_f"),
    "gpt_neox": ("gpt_neox", "embed_in", "layers", "final_layer_norm"),
    "phi": ("model", "embed_tokens", "layers", "final_layernorm"),
}


class Kept:
    """What a block under selective checkpointing keeps: the outputs of attention, and of every
    second linear layer. They are made when the block runs first, and found when it runs again."""

    def __init__(self) -> None:
        self.outputs: list[tuple[Storage, ...]] = []
        self.runs = 0

    def begin(self) -> None:
        self.runs += 1
        self.matmuls = 0

    def keeps_this_matmul(self) -> bool:
        self.matmuls += 1
        return self.matmuls % 2 == 1

    def keep(self, *made: Storage) -> None:
        if self.runs == 1:
            self.outputs.append(made)

    def there(self) -> tuple[Storage, ...]:
        """The next outputs, from when the block runs again; the tape saves what it still needs."""
        return self.outputs.pop(0) if self.runs > 1 else ()


class Program(ABC):
    """One micro-batch's forward: B sequences of S tokens, T in all, through `spec`.

    A subclass gives weights, and says what a module is and what a checkpoint.
    """

    def __init__(
        self,
        tape: Tape,
        spec: ModelSpec,
        execution: Execution,
        tokens: tuple[int, int],
        autocast: bool,
        checkpointing: str,
    ) -> None:
        self.tape, self.spec, self.execution = tape, spec, execution
        self.batch, self.seq = tokens
        self.autocast, self.checkpointing = autocast, checkpointing
        self.ranks = execution.tensor_parallel
        shared = self.ranks if execution.sequence_parallel else 1
        self.tokens = self.batch * self.seq
        self.rows = self.tokens // shared  # of all but attention and the MLP's inside
        self.casts: dict[str, Tensor] = {}  # of weights, while autocast keeps them
        self.logits: list[Tensor] = []  # while the training loop keeps them
        self.kept: Kept | None = None  # of the block that is computed under a checkpoint

    @abstractmethod
    def weight(self, name: str) -> Tensor: ...

    @abstractmethod
    def numel(self, name: str) -> int: ...

    def cast(self, weight: Tensor, name: str) -> Tensor:
        """The copy that autocast makes of a weight: once in a forward, if it is trained."""
        if name in self.casts:
            return self.casts[name]
        copy, nbytes = self.tape.new(BF16 * self.numel(name), ACTIVATIONS), weight.nbytes
        made = self.tape.made(
            copy, weight.numel, BF16, (weight,), lambda _: [self.tape.new(nbytes)]
        )
        if weight.node:
            self.casts[name] = made
        return made

    @abstractmethod
    def module(self, name: str, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor: ...

    @abstractmethod
    def checkpoint(self, forward: Callable[..., Tensor], *inputs: Tensor) -> Tensor: ...

    @abstractmethod
    def has(self, weight: str) -> bool: ...

    # The whole model.

    def loss(self) -> Tensor:
        """Forward of the whole model: the mean cross-entropy of next tokens, one number."""
        names = STEMS.get(self.spec.family, ("model", "embed_tokens", "layers", "norm"))
        body, *parts = names
        ids = Tensor(self.tape.new(8 * self.tokens), self.tokens, 8, None)

        def model(ids: Tensor) -> Tensor:
            x = self.module(body, lambda ids: self.decoder(ids, body, *parts), ids)
            if self.execution.loss_chunks > 1:
                return x
            with self.tape.recording(self.tape.records, LOGITS):
                return self.linear(HEAD, x, self.spec.vocab_size)

        if self.execution.loss_chunks > 1:
            return losses.chunked_cross_entropy(
                self.tape,
                self.module("", model, ids),
                self.weight(f"{HEAD}.weight"),
                self.tokens,
                self.spec.vocab_size,
                self.execution.loss_chunks,
            )
        kept = self.logits if self.execution.keeps_logits else []
        return losses.cross_entropy(self.tape, self.module("", model, ids), self.tokens, kept)

    def decoder(self, ids: Tensor, body: str, stem: str, layers: str, last: str) -> Tensor:
        h, rows = self.spec.hidden_size, self.rows

        def embed(name: str) -> Tensor:
            weight = self.weight(f"{name}.weight")
            return self.module(
                name, lambda ids: op.embedding(self.tape, ids, weight, rows * h), ids
            )

        x = embed(f"{body}.{stem}")
        if self.spec.max_positions:
            x = op.add(self.tape, x, embed(f"{body}.wpe"))
            x = self.dropped(x)
        block = BLOCKS.get(self.spec.family, llama_block)
        for layer in range(self.spec.num_layers):
            name = f"{body}.{layers}.{layer}"

            forward = partial(block, self, name)
            if self.checkpointing == "full":
                forward = partial(self.checkpoint, forward)
            elif self.checkpointing == "selective" and self.execution.attention == "flash":
                forward = partial(self.checkpoint, partial(self.keeping, Kept(), forward))
            x = self.module(name, forward, x)
        return self.norm(f"{body}.{last}", x)

    # What blocks are made of.

    def norm(self, name: str, x: Tensor) -> Tensor:
        parts = [f"{name}.{part}" for part in ("weight", "bias")]
        weights = tuple(self.weight(part) for part in parts if self.has(part))
        rows = x.numel // self.spec.hidden_size
        if self.execution.norm == "fused" or len(weights) == 2:
            forward = partial(op.norm, self.tape, weights=weights, rows=rows)
        else:
            forward = partial(op.unfused_rms_norm, self.tape, weight=weights[0], rows=rows)
        return self.module(name, forward, x)

    def linear(self, name: str, x: Tensor, features: int, rows: int = 0) -> Tensor:
        """x to [rows, features], rows being those of x where no others are given."""
        weight = self.weight(f"{name}.weight")
        bias = self.weight(f"{name}.bias") if self.has(f"{name}.bias") else None

        def forward(x: Tensor, weight=weight) -> Tensor:
            if self.autocast:
                x = op.to(self.tape, x, BF16)
                weight = self.cast(weight, f"{name}.weight")
            numel = (rows or self.rows) * features
            if self.kept is None or not self.kept.keeps_this_matmul():
                return op.linear(self.tape, x, weight, numel, bias)
            (out,) = self.kept.there() or (None,)
            made = op.linear(self.tape, x, weight, numel, bias, out)
            self.kept.keep(made.storage)
            return made

        return self.module(name, forward, x)

    def keeping(self, kept: Kept, forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        """A block's forward, of which some outputs are kept, and found when it runs again."""
        kept.begin()
        self.kept = kept
        x = forward(x)
        self.kept = None
        return x

    def dropped(self, x: Tensor) -> Tensor:
        return op.dropout(self.tape, x) if self.execution.dropout else x

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Each [T, heads · D] to [T, heads · D]; of k and v heads may be fewer."""
        heads = self.spec.num_heads // self.ranks
        if self.execution.attention == "flash":
            rows = self.tokens * heads
            if self.kept is None:
                return op.flash_attention(self.tape, q, k, v, rows)
            kept = self.kept.there() or (self.tape.new(q.nbytes), self.tape.new(op.FP32 * rows))
            self.kept.keep(*kept)
            return op.flash_attention(self.tape, q, k, v, rows, kept)

        def core(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            scores = op.matmul(self.tape, q, k, self.tokens * self.seq * heads)
            scores = op.scaled(self.tape, scores)
            scores = self.dropped(op.softmax(self.tape, scores))
            return op.matmul(self.tape, scores, v, q.numel)

        if self.checkpointing == "selective":
            return self.checkpoint(core, q, k, v)
        return core(q, k, v)

    def ordered(self, x: Tensor, forward: bool, backward: bool) -> Tensor:
        """In attention's order, [B, heads, S, D], or back from it."""
        if self.execution.device != "cpu":
            return x
        return op.copied(self.tape, x, forward, backward)
