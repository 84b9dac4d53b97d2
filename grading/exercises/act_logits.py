"""Lesson 02, 02-logits: how much of the vocabulary's width is there at once."""

from course_lib import ledger
from course_lib.checks.exercise import Case, Exercise, Misconception, call_for_a_line

PARTS = {"forward": 1, "backward": 2}


def most(tokens, vocabulary, chunks, kept):
    logits = -(-tokens // chunks) * vocabulary  # of one chunk
    forward = max(2, 2 + 4, 4 + 4)  # logits; with their fp32 copy; that with log_softmax
    backward = max(4 + 4, 4 + 4 + 4, 4 + 2) + (4 if kept else 0)
    return {"forward": forward * logits, "backward": backward * logits}


def _by_walking(tokens, vocabulary, chunks, kept):
    """Makes and lets go, step by step, as the table has it."""
    size = (tokens + chunks - 1) // chunks * vocabulary
    forward = [[2], [4, -2], [4], [0 if kept else -4]]
    backward = [[4], [4, -4, -4], [2, -4]]

    def highest(steps, now):
        top = now
        for changes in steps:
            for change in changes:
                now += change
                top = max(top, now)
        return top

    start = sum(map(sum, forward))
    return {"forward": highest(forward, 0) * size, "backward": highest(backward, start) * size}


def _most(
    forward=lambda kept: 8,
    backward=lambda kept: 16 if kept else 12,
    rows=lambda tokens, chunks: -(-tokens // chunks),
):
    """The reference with one thing wrong; bytes of each logit."""

    def answer(tokens, vocabulary, chunks, kept):
        size = rows(tokens, chunks) * vocabulary
        return {"forward": forward(kept) * size, "backward": backward(kept) * size}

    return answer


def _cases(tokens: int, vocabulary: int, chunks: int, kept: bool) -> list[Case]:
    name = f"{tokens:,} tokens, vocabulary {vocabulary:,}, chunks {chunks}"
    name += ", the copy is kept" if kept else ""
    return [Case(name, (tokens, vocabulary, chunks, kept), part) for part in PARTS]


LOGITS = Exercise(
    id="02-logits",
    title="The price of a vocabulary",
    task="Return the most bytes of logits and their like at once, in forward and in backward.",
    points=PARTS,
    reference=most,
    alternatives=(_by_walking,),
    cases=(
        *_cases(100, 1000, 1, False),
        *_cases(100, 1000, 1, True),
        *_cases(100, 1000, 8, False),
        *_cases(8192, 128_256, 1, False),
    ),
    fresh=lambda rng: _cases(
        1 + 16 * rng.randrange(20, 500), rng.randrange(30_000, 260_000), 16, rng.random() < 0.5
    ),
    run=call_for_a_line,
    library=(ledger.peak, ledger.timeline),
    nudge="Go down the table with a running sum, of bytes for each logit: 2, 6, 8 in forward. "
    "What a step needs is there until it is done, so add what it makes before you take away what "
    "goes. A chunk has tokens / chunks rows, rounded up.",
    misconceptions=(
        Misconception(
            "logits alone",
            _most(forward=lambda kept: 2),
            "You count the bf16 logits alone. The loss casts them to fp32, and log_softmax is a "
            "third tensor of that size.",
        ),
        Misconception(
            "no log_softmax",
            _most(forward=lambda kept: 6),
            "You have the logits and their fp32 copy. When log_softmax comes the bf16 logits are "
            "gone, but it has 4 bytes itself: 4 + 4.",
        ),
        Misconception(
            "the bf16 logits stay",
            _most(forward=lambda kept: 10),
            "You keep the bf16 logits. A cast saves nothing, and no variable has them: they go as "
            "soon as the fp32 copy is there.",
        ),
        Misconception(
            "one gradient",
            _most(backward=lambda kept: 12 if kept else 8),
            "You have log_softmax and one gradient. Its backward reads both, and makes the "
            "gradient of the logits: three tensors at once.",
        ),
        Misconception(
            "the last gradient too",
            _most(backward=lambda kept: 18 if kept else 14),
            "You add the bf16 gradient to all the others. When it is made log_softmax and its "
            "gradient are gone.",
        ),
        Misconception(
            "as in forward",
            _most(backward=lambda kept: 8),
            "Your backward has what forward has. It makes gradients, each of 4 bytes a logit, "
            "while log_softmax is still there.",
        ),
        Misconception(
            "kept or not",
            _most(backward=lambda kept: 12),
            "You overlook `kept`: a variable of the training loop that has the fp32 logits keeps "
            "4 bytes of each through backward.",
        ),
        Misconception(
            "always kept",
            _most(backward=lambda kept: 16),
            "You keep the fp32 logits always. log_softmax saves its output, not its input: they "
            "go, unless a variable has them.",
        ),
        Misconception(
            "the copy is kept in forward alone",
            _most(forward=lambda kept: 12 if kept else 8),
            "In forward the fp32 copy is there once, whether or not it is kept.",
        ),
        Misconception(
            "chunks overlooked",
            _most(rows=lambda tokens, chunks: tokens),
            "You count all tokens. A chunk goes through forward and backward before the next "
            "one comes: one chunk's logits are there at a time.",
        ),
        Misconception(
            "chunks rounded down",
            _most(rows=lambda tokens, chunks: tokens // chunks),
            "You rounded the chunk down. The largest chunk has tokens / chunks rounded up.",
        ),
        Misconception(
            "a part of a token",
            _most(rows=lambda tokens, chunks: tokens / chunks),
            "Your chunk has a part of a token. Round up first, then multiply.",
        ),
        Misconception(
            "elements",
            _most(forward=lambda kept: 2, backward=lambda kept: 4 if kept else 3),
            "You count tensors. bf16 has 2 bytes an element, fp32 has 4.",
        ),
        Misconception(
            "no dict",
            lambda *args: tuple(most(*args).values()),
            'Your function does not return a dict with the keys "forward" and "backward".',
        ),
    ),
)
