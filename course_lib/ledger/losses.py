"""The loss: cross-entropy of logits [T, V], which is where large vocabularies cost."""

from __future__ import annotations

from course_lib.ledger.operators import FP32, to
from course_lib.ledger.tape import LOGITS, Tape, Tensor


def cross_entropy(tape: Tape, logits: Tensor, tokens: int, kept: list[Tensor]) -> Tensor:
    """The mean over tokens, in fp32: log_softmax [T, V], which is saved, then one number. The fp32
    logits are left in `kept`."""
    with tape.recording(tape.records, LOGITS):
        wide = to(tape, logits, FP32)
        del logits
        kept.append(wide)
        targets = tape.new(8 * tokens)
        log_softmax, nbytes = tape.new(wide.nbytes), wide.nbytes

        def backward(gradient, saved=(log_softmax, targets)):
            for_log = tape.new(nbytes, LOGITS)
            for_logits = tape.new(nbytes, LOGITS)
            del for_log
            yield for_logits

        return tape.made(None, 1, FP32, (wide,), backward)


def chunked_cross_entropy(
    tape: Tape, x: Tensor, weight: Tensor, tokens: int, vocabulary: int, chunks: int
) -> Tensor:
    """Head and cross_entropy of one chunk of tokens after another, each computed again in backward:
    logits are never there for more than one chunk. Saves x alone."""
    rows, itemsize, nbytes = -(-tokens // chunks), x.itemsize, x.nbytes

    def chunk(category: int = LOGITS) -> None:
        logits = tape.new(rows * vocabulary * itemsize, category)
        wide = logits if itemsize == FP32 else tape.new(rows * vocabulary * FP32, category)
        log_softmax = tape.new(rows * vocabulary * FP32, category)
        del logits, wide, log_softmax

    def backward(gradient, saved=x.storage):
        for_weight = weight.node and tape.new(weight.nbytes)
        for_x = tape.new(nbytes)
        for i in range(chunks):
            log_softmax = tape.new(rows * vocabulary * FP32, LOGITS)
            chunk()
            again = tape.new(weight.nbytes) if for_weight and i else None
            del log_softmax, again
        yield for_weight
        yield for_x

    for _ in range(chunks):
        chunk()
    return tape.made(None, 1, FP32, (weight, x), backward)
