"""What each operator of a transformer makes, saves for its backward, and needs there.

Each function is one operator, or a few that belong together, on a Tape. What it saves is what its
`backward` refers to. Where PyTorch has a fused kernel, and an unfused way of several operators,
there are two functions. Sources: the formulas of PyTorch's derivatives, and what a dispatch mode
sees of them on a CPU, version 2.13; the tests compare.

T tokens, H hidden, D a head's size, V vocabulary. fp32 statistics are 4 bytes each.
"""

from __future__ import annotations

from collections.abc import Sequence

from course_lib.ledger.tape import LOGITS, Storage, Tape, Tensor

FP32 = 4


def linear(
    tape: Tape,
    x: Tensor,
    weight: Tensor,
    numel: int,
    bias: Tensor | None = None,
    out: Storage | None = None,
) -> Tensor:
    """x [T, in] to `numel` elements; saves x, and the weight where that is a copy. `out` is there
    already, if a checkpoint has kept it."""
    inputs = (weight, x) if bias is None else (bias, weight, x)
    saved = (weight.node and x.storage, x.node and weight.storage)
    sizes = [each.node and each.nbytes for each in inputs]

    def backward(gradient: Storage, saved=saved):
        for nbytes in sizes:
            yield nbytes and tape.new(nbytes)

    return tape.made(out, numel, x.itemsize, inputs, backward)


def to(tape: Tape, x: Tensor, itemsize: int) -> Tensor:
    """In another dtype: a copy."""
    if x.itemsize == itemsize:
        return x
    nbytes, category = x.nbytes, LOGITS if tape.category == LOGITS else None

    def backward(gradient):
        yield tape.new(nbytes, category)

    return tape.made(None, x.numel, itemsize, (x,), backward)


def copied(tape: Tape, x: Tensor, forward: bool, backward: bool) -> Tensor:
    """Seen in another order: copied where the order in memory has to be another, too."""
    nbytes = x.nbytes

    def back(gradient):
        yield tape.new(nbytes) if backward else gradient

    return tape.made(None if forward else x.storage, x.numel, x.itemsize, (x,), back)


def add(tape: Tape, x: Tensor, y: Tensor) -> Tensor:
    """Saves nothing; both get the same gradient, cast where it has to be."""
    numel, itemsizes = x.numel, (x.itemsize, y.itemsize)
    itemsize = max(itemsizes)

    def backward(gradient):
        for each in itemsizes:
            yield gradient if each == itemsize else tape.new(numel * each)

    return tape.made(None, numel, itemsize, (x, y), backward)


def multiply(tape: Tape, x: Tensor, y: Tensor) -> Tensor:
    """Element by element; saves both. y may be one number for each row of x."""
    sizes = [each.node and each.nbytes for each in (x, y)]

    def backward(gradient, saved=(x.storage, y.storage)):
        for nbytes in sizes:
            yield nbytes and tape.new(nbytes)

    return tape.made(None, x.numel, x.itemsize, (x, y), backward)


def picked(tape: Tape, x: Tensor, numel: int) -> Tensor:
    """Some rows of x, copied; their gradient is one of all rows."""
    nbytes = x.nbytes

    def backward(gradient):
        yield tape.new(nbytes)

    return tape.made(None, numel, x.itemsize, (x,), backward)


def summed(tape: Tape, parts: Sequence[Tensor], numel: int) -> Tensor:
    """Rows of each part added where they came from."""
    sizes = [part.nbytes for part in parts]

    def backward(gradient):
        for nbytes in sizes:
            yield tape.new(nbytes)

    return tape.made(None, numel, parts[0].itemsize, parts, backward)


def split(tape: Tape, x: Tensor, count: int) -> list[Tensor]:
    """Views of equal size, whose gradients are put together again when the last has come."""
    nbytes, whole = x.nbytes, []

    def join(gradient):
        yield gradient

    def backward(gradient):
        if not whole:
            whole.append(tape.new(nbytes))
        yield whole[0]

    one = tape.made(x.storage, x.numel, x.itemsize, (x,), join)
    return [
        tape.made(x.storage, x.numel // count, x.itemsize, (one,), backward) for _ in range(count)
    ]


def activation(tape: Tape, x: Tensor) -> Tensor:
    """GELU or SiLU: saves its input."""
    nbytes = x.nbytes

    def backward(gradient, saved=x.storage):
        yield tape.new(nbytes)

    return tape.made(None, x.numel, x.itemsize, (x,), backward)


def dropout(tape: Tape, x: Tensor) -> Tensor:
    """Saves a mask, one byte for each element."""
    mask, nbytes = tape.new(x.numel), x.nbytes

    def backward(gradient, saved=mask):
        yield tape.new(nbytes)

    return tape.made(None, x.numel, x.itemsize, (x,), backward)


def embedding(tape: Tape, tokens: Tensor, weight: Tensor, numel: int) -> Tensor:
    """To `numel` elements; saves the token ids. The gradient is dense."""

    def backward(gradient, saved=tokens.storage):
        yield tape.new(weight.nbytes)

    return tape.made(None, numel, weight.itemsize, (weight,), backward)


def norm(tape: Tape, x: Tensor, weights: tuple[Tensor, ...], rows: int) -> Tensor:
    """RMSNorm or LayerNorm in one kernel: saves x, and fp32 statistics of each row."""
    statistics = tape.new(FP32 * rows * len(weights))  # LayerNorm, with a bias, has a mean, too

    def backward(gradient, saved=(x.storage, statistics)):
        yield tape.new(x.nbytes)
        for weight in weights:
            yield weight.node and tape.new(weight.nbytes)

    return tape.made(None, x.numel, x.itemsize, (x, *weights), backward)


def unfused_rms_norm(tape: Tape, x: Tensor, weight: Tensor, rows: int) -> Tensor:
    """RMSNorm as PyTorch composes it on a CPU, in fp32: saves x in fp32, and x / rms(x)."""
    wide, numel = to(tape, x, FP32), x.numel
    square, mean = tape.new(FP32 * numel), tape.new(FP32 * rows)
    scale = tape.new(FP32 * rows)
    del square, mean

    def normalize(gradient, saved=(wide.storage, scale)):
        for_x, for_scale = tape.new(FP32 * numel), tape.new(FP32 * numel)
        del gradient, for_scale
        for_mean = tape.new(FP32 * numel)
        power, doubled = tape.new(FP32 * numel), tape.new(FP32 * numel)
        through_mean = tape.new(FP32 * numel)
        del power, doubled, for_mean
        if tape.sums_in_place:
            yield for_x
        else:
            both = tape.new(FP32 * numel)
            del through_mean, for_x
            yield both

    normal = tape.made(None, numel, FP32, (wide,), normalize)

    def rescale(gradient, saved=normal.storage):
        for_x, product = tape.new(FP32 * numel), tape.new(FP32 * numel)
        for_weight = weight.node and tape.new(weight.nbytes)
        del product
        yield for_x
        yield for_weight

    return to(tape, tape.made(None, numel, FP32, (normal, weight), rescale), x.itemsize)


def rotary(tape: Tape, x: Tensor, positions: int) -> Tensor:
    """Rotary positions, unfused: saves cos and sin of `positions` angles, and not x."""
    half, nbytes = x.nbytes // 2, x.nbytes
    table = tape.new(2 * positions * x.itemsize)
    first = tape.new(half)
    products = [tape.new(half) for _ in range(3)]
    del products[:2]
    out = tape.new(nbytes)
    del first, products

    def backward(gradient, saved=table):
        parts = [tape.new(half) for _ in range(4)]
        del parts[:2]
        whole = tape.new(nbytes)
        del parts
        yield whole

    return tape.made(out, x.numel, x.itemsize, (x,), backward)


def flash_attention(
    tape: Tape, q: Tensor, k: Tensor, v: Tensor, rows: int, kept: tuple[Storage, ...] = ()
) -> Tensor:
    """Scaled dot-product attention in one kernel: saves q, k, v, its output, and one fp32 statistic
    for each of `rows`, a query of a head. The last two are there already, if they are `kept`."""
    out, statistics = kept or (tape.new(q.nbytes), tape.new(FP32 * rows))

    def backward(gradient, saved=(q.storage, k.storage, v.storage, out, statistics)):
        for each in (q, k, v):
            yield tape.new(each.nbytes)

    return tape.made(out, q.numel, q.itemsize, (q, k, v), backward)


def matmul(tape: Tape, x: Tensor, y: Tensor, numel: int) -> Tensor:
    """Of two activations: saves both."""

    def backward(gradient, saved=(x.storage, y.storage)):
        yield tape.new(x.nbytes)
        yield tape.new(y.nbytes)

    return tape.made(None, numel, x.itemsize, (x, y), backward)


def scaled(tape: Tape, x: Tensor) -> Tensor:
    """Times a constant, or masked by one: saves nothing that counts."""
    nbytes = x.nbytes

    def backward(gradient):
        yield tape.new(nbytes)

    return tape.made(None, x.numel, x.itemsize, (x,), backward)


def softmax(tape: Tape, x: Tensor) -> Tensor:
    """Saves its output."""
    out, nbytes = tape.new(x.nbytes), x.nbytes

    def backward(gradient, saved=out):
        yield tape.new(nbytes)

    return tape.made(out, x.numel, x.itemsize, (x,), backward)
