"""Lesson 09, 09-units: as few collectives as fit into the memory that there is."""

from course_lib.checks.exercise import Case, Exercise, Misconception, call_for_a_line

PARTS = {"blocks": 2, "collectives": 1}


def choose(block, blocks, ahead, budget):
    def fits(g):
        return min((1 + ahead) * g, blocks) * block <= budget

    most = max(g for g in range(1, blocks + 1) if blocks % g == 0 and fits(g))
    return {"blocks": most, "collectives": 3 * blocks // most}


def _from_the_top(block, blocks, ahead, budget):
    for units in range(1, blocks + 1):  # from one unit, the model, to one for each block
        if blocks % units == 0:
            whole = block * (blocks // units) * min(1 + ahead, units)
            if whole <= budget:
                return {"blocks": blocks // units, "collectives": units + units + units}


def _choose(
    fits=lambda g, ahead, blocks, room: min((1 + ahead) * g, blocks) <= room,
    divides=lambda g, blocks: blocks % g == 0,
    pick=max,
    collectives=lambda units, blocks, ahead: 3 * units,
):
    """The reference with one thing wrong; `room` is the budget in blocks."""

    def answer(block, blocks, ahead, budget):
        those = [
            g
            for g in range(1, blocks + 1)
            if divides(g, blocks) and fits(g, ahead, blocks, budget / block)
        ]
        g = pick(those)
        return {"blocks": g, "collectives": collectives(-(-blocks // g), blocks, ahead)}

    return answer


def _cases(block: int, blocks: int, ahead: int, budget: int) -> list[Case]:
    name = f"{blocks} blocks, {ahead} ahead, room for {budget / block:g} blocks"
    return [Case(name, (block, blocks, ahead, budget), part) for part in PARTS]


UNITS = Exercise(
    id="09-units",
    title="As coarse as fits",
    task="Return the most blocks per unit that fit, and how many collectives a step then has.",
    points=PARTS,
    reference=choose,
    alternatives=(_from_the_top,),
    cases=(
        *_cases(100, 12, 1, 700),
        *_cases(100, 12, 1, 600),
        *_cases(100, 12, 1, 1000),
        *_cases(100, 12, 1, 1200),
        *_cases(100, 12, 0, 700),
    ),
    fresh=lambda rng: _cases(block := rng.randrange(10**6, 10**8), 24, 2, 20 * block),
    run=call_for_a_line,
    nudge="Whole at a time are 1 + ahead units of g blocks, but never more blocks than there are. "
    "Of the g that divide the blocks take the largest that fits. Each unit has two all_gathers and "
    "a reduce_scatter.",
    misconceptions=(
        Misconception(
            "the unit that computes alone",
            _choose(fits=lambda g, ahead, blocks, room: g <= room),
            "You leave room for the unit that computes alone. While it does, the next `ahead` "
            "units are gathered: they are whole, too.",
        ),
        Misconception(
            "as fine as can be",
            _choose(pick=min),
            "One block per unit fits, and has the most collectives of all. Each of them costs "
            "latency: take the coarsest that fits.",
        ),
        Misconception(
            "the whole model",
            _choose(fits=lambda *_: True),
            "One unit for all blocks has the fewest collectives, and the whole model is gathered "
            "at once. It must fit into the budget.",
        ),
        Misconception(
            "units of unequal size",
            _choose(divides=lambda *_: True),
            "Your units do not come out even: the number of blocks in one must divide all blocks.",
        ),
        Misconception(
            "must be less",
            _choose(fits=lambda g, ahead, blocks, room: min((1 + ahead) * g, blocks) < room),
            "What takes just the budget fits.",
        ),
        Misconception(
            "more than there are",
            _choose(fits=lambda g, ahead, blocks, room: (1 + ahead) * g <= room),
            "You count more blocks than there are: near the end, and where one unit is the whole "
            "model, there is nothing left to gather ahead.",
        ),
        Misconception(
            "one gather",
            _choose(collectives=lambda units, blocks, ahead: 2 * units),
            "You count an all_gather and a reduce_scatter for each unit. It is freed after "
            "forward, so backward gathers it again.",
        ),
        Misconception(
            "one collective",
            _choose(collectives=lambda units, blocks, ahead: units),
            "You count one collective for each unit: that is forward alone. Backward gathers "
            "again, and reduces gradients.",
        ),
        Misconception(
            "by block",
            _choose(collectives=lambda units, blocks, ahead: 3 * blocks),
            "You count collectives for each block. A unit is gathered as one, however many blocks "
            "it has: that is what coarse units are for.",
        ),
        Misconception(
            "more for gathering ahead",
            _choose(collectives=lambda units, blocks, ahead: (3 + ahead) * units),
            "Gathering ahead changes when a gather is issued, not how many there are.",
        ),
        Misconception(
            "units in place of blocks",
            lambda *args: (
                {"blocks": args[1] // choose(*args)["blocks"]}
                | {"collectives": choose(*args)["collectives"]}
            ),
            'Your "blocks" is how many units there are. Asked is how many blocks one has.',
        ),
        Misconception(
            "no dict",
            lambda *args: tuple(choose(*args).values()),
            'Your function does not return a dict with the keys "blocks" and "collectives".',
        ),
    ),
)
