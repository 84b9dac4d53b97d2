"""Lesson 02, 02-saved: what a layer of GPT leaves to backward, operator by operator."""

from course_lib import ledger
from course_lib.checks.comparison import close
from course_lib.checks.exercise import Case, Exercise, Misconception
from course_lib.ledger import work as library

PARTS = {"explicit": 2, "flash": 1}


def saved(s, b, h, a, itemsize, flash):
    sbh, scores = s * b * h, a * s * s * b
    rest = 16 * itemsize * sbh + 2 * sbh  # two masks
    return rest if flash else rest + 2 * itemsize * scores + scores


def _by_operator(s, b, h, a, itemsize, flash):
    operators = {  # [T, h] tensors, and masks of that size
        "norms": (2, 0),
        "q, k and v": (1, 0),
        "attention": (3, 0),
        "output": (1, 1),
        "mlp": (1 + 4 + 4, 1),
    }
    per_element = sum(tensors * itemsize + masks for tensors, masks in operators.values())
    if not flash:
        per_element += (2 * itemsize + 1) * a * s / h
    return round(s * b * h * per_element)


def _saved(
    tensors=16,
    masks=lambda itemsize: 2,
    scores=lambda s, b, h, a: a * s * s * b,
    each=lambda itemsize: 2 * itemsize + 1,
    flash_keeps=0,
    itemsize_is=lambda itemsize: itemsize,
):
    """The reference with one thing wrong."""

    def answer(s, b, h, a, itemsize, flash):
        w = itemsize_is(itemsize)
        rest = (tensors * w + masks(w)) * s * b * h
        return rest + (flash_keeps if flash else 1) * each(w) * scores(s, b, h, a)

    return answer


def _case(s: int, b: int, h: int, a: int, itemsize: int, flash: bool) -> Case:
    kind = "flash" if flash else "explicit"
    name = f"s {s:,}, b {b}, h {h:,}, a {a}, {8 * itemsize} bits, {kind}"
    return Case(name, (s, b, h, a, itemsize, flash), kind)


SAVED = Exercise(
    id="02-saved",
    title="What a layer saves",
    task="Return the bytes that one layer of GPT saves for backward.",
    points=PARTS,
    reference=saved,
    alternatives=(_by_operator,),
    cases=(
        _case(4, 1, 8, 2, 2, False),
        _case(4, 1, 8, 2, 2, True),
        _case(2048, 4, 6144, 64, 2, False),
        _case(2048, 4, 6144, 64, 4, False),
        _case(2048, 4, 6144, 64, 4, True),
    ),
    fresh=lambda rng: [
        _case(512 * rng.randrange(1, 9), rng.randrange(2, 9), 96 * 64, 48, rng.choice((2, 4)), x)
        for x in (False, True)
    ],
    compare=close(1e-9),  # 5as/h may be a fraction
    library=(library.work, ledger.peak),
    nudge="Add up the table: 16 tensors' worth of s·b·h elements, two masks of s·b·h bytes, and, "
    "where scores are there, two tensors and a mask of a·s²·b. For 16 bits that is "
    "sbh(34 + 5as/h).",
    misconceptions=(
        Misconception(
            "flash keeps scores",
            _saved(flash_keeps=1),
            "You count scores under flash attention, too. It computes them again in backward, "
            "block by block, and keeps nothing of that size.",
        ),
        Misconception(
            "flash keeps nothing",
            lambda s, b, h, a, w, flash: saved(s, b, h, a, w, flash) - flash * 3 * w * s * b * h,
            "Under flash attention you let go of q, k and v, too. It needs them in backward, to "
            "compute the scores again.",
        ),
        Misconception(
            "masks as wide as the rest",
            _saved(masks=lambda w: 2 * w, each=lambda w: 3 * w),
            "Your masks are as wide as the tensors. A dropout mask is yes or no: one byte for each "
            "element, whatever the dtype.",
        ),
        Misconception(
            "always 16 bits",
            _saved(itemsize_is=lambda w: 2),
            "34 and 5 are for elements of 2 bytes. Use `itemsize`: tensors grow with it, masks do "
            "not.",
        ),
        Misconception(
            "scores always 16 bits",
            _saved(each=lambda w: 5),
            "34 and 5 are for elements of 2 bytes. Use `itemsize`: tensors grow with it, masks do "
            "not.",
        ),
        Misconception(
            "all grows with itemsize",
            lambda s, b, h, a, w, flash: saved(s, b, h, a, 2, flash) * w / 2,
            "You scale 34 and 5 with `itemsize`. 32 of the 34, and 4 of the 5, grow with it; the "
            "rest are masks, of one byte for each element.",
        ),
        Misconception(
            "5as/h outside",
            lambda s, b, h, a, w, flash: (
                (16 * w + 2) * s * b * h + (0 if flash else (2 * w + 1) * a * s / h)
            ),
            "5as/h stands in the brackets: it is multiplied by s·b·h, too. Scores have 5·a·s²·b "
            "bytes.",
        ),
        Misconception(
            "no masks",
            _saved(masks=lambda w: 0, each=lambda w: 2 * w),
            "You forgot the masks of dropout: one byte for each element that could be dropped.",
        ),
        Misconception(
            "a mask of scores is missing",
            _saved(each=lambda w: 2 * w),
            "Scores are dropped out as well: their mask has one byte for each score.",
        ),
        Misconception(
            "scores of one head",
            _saved(scores=lambda s, b, h, a: s * s * b),
            "You count the scores of one head. Each of the `a` heads has its own s × s of them.",
        ),
        Misconception(
            "scores of one sequence",
            _saved(scores=lambda s, b, h, a: a * s * s),
            "You count the scores of one sequence. Each of the `b` sequences has its own.",
        ),
        Misconception(
            "scores grow with s",
            _saved(scores=lambda s, b, h, a: a * s * b),
            "Your scores grow with s. Each of s queries meets each of s keys: s² scores a head.",
        ),
        Misconception(
            "scores as wide as the hidden size",
            _saved(scores=lambda s, b, h, a: s * s * b * h),
            "Your scores have h for each pair of tokens. A pair has one score in each head: a.",
        ),
        Misconception(
            "a narrow MLP",
            _saved(tensors=10),
            "Inside of the MLP tensors are 4h wide: GELU's input, and that of the second linear "
            "layer, have 4·s·b·h elements each.",
        ),
        Misconception(
            "norms forgotten",
            _saved(tensors=14),
            "You forgot the two norms: each saves its input, s·b·h elements.",
        ),
        Misconception(
            "elements",
            _saved(itemsize_is=lambda w: 1),
            "You count elements. Each has `itemsize` bytes, except in a mask.",
        ),
    ),
)
