"""Lesson 02, 02-allocated: an allocator that keeps what it once had, and does not split blocks."""

from itertools import count

from course_lib.checks.exercise import Case, Exercise, Misconception, call_for_a_line

PARTS = {"allocated": 1, "reserved": 3}


def run(events):
    live, cached, most, reserved = {}, [], 0, 0
    for name, size in events:
        if size == 0:
            cached.append(live.pop(name)[1])
            continue
        fitting = [block for block in cached if block >= size]
        block = min(fitting, default=size)
        if fitting:
            cached.remove(block)
        else:
            reserved += size
        live[name] = size, block
        most = max(most, sum(asked for asked, _ in live.values()))
    return {"allocated": most, "reserved": reserved}


def _with_slots(events):
    """Blocks stay in one list, which grows: [size, who has it], and what they asked for."""
    slots, asked, most = [], {}, 0
    for name, size in events:
        if not size:
            del asked[name]
            for slot in slots:
                slot[1] = None if slot[1] == name else slot[1]
        else:
            asked[name] = size
            free = sorted((s for s in slots if s[1] is None and s[0] >= size), key=lambda s: s[0])
            if free:
                free[0][1] = name
            else:
                slots.append([size, name])
        most = max(most, sum(asked.values()))
    return {"reserved": sum(size for size, _ in slots), "allocated": most}


def _run(
    fits=lambda block, size: block >= size,
    pick=min,
    after=lambda cached, block, size: cached.remove(block) or block,
    freed=lambda size, block: block,
    returned=False,
    in_the_end=False,
    allocated=lambda history, blocks: max(history),
):
    """The reference with one thing wrong."""

    def answer(events):
        live, cached, reserved, history, blocks = {}, [], 0, [0], [0]
        peak = 0
        for name, size in events:
            if size == 0:
                asked, block = live.pop(name)
                if returned:
                    reserved -= block
                else:
                    cached.append(freed(asked, block))
            else:
                fitting = [block for block in cached if fits(block, size)]
                block = pick(fitting) if fitting else size
                if fitting:
                    block = after(cached, block, size)
                else:
                    reserved += size
                live[name] = size, block
            peak = max(peak, reserved)
            history.append(sum(size for size, _ in live.values()))
            blocks.append(sum(block for _, block in live.values()))
        return {
            "allocated": allocated(history, blocks),
            "reserved": reserved if in_the_end else peak,
        }

    return answer


def _split(cached, block, size):
    cached.remove(block)
    if block > size:
        cached.append(block - size)
    return size


def _cases(name: str, *events) -> list[Case]:
    return [Case(name, ([list(event) for event in events],), part) for part in PARTS]


def _fresh(rng) -> list[Case]:
    """Tensors come and go at random, of many sizes."""
    names, live, events = count(), [], []
    for _ in range(30):
        if live and rng.random() < 0.45:
            events.append((live.pop(rng.randrange(len(live))), 0))
        else:
            live.append(f"t{next(names)}")
            events.append((live[-1], rng.randrange(1, 60)))
    return _cases("thirty events", *events)


ALLOCATED = Exercise(
    id="02-allocated",
    title="Allocated, reserved",
    task="Return the most bytes that tensors have at once, and what the allocator has reserved.",
    points=PARTS,
    reference=run,
    alternatives=(_with_slots,),
    cases=(
        *_cases("one after the other", ("a", 10), ("a", 0), ("b", 10)),
        *_cases("a larger one", ("a", 10), ("a", 0), ("b", 12)),
        *_cases("two smaller ones", ("a", 10), ("a", 0), ("b", 5), ("c", 5)),
        *_cases("one too many", ("a", 10), ("a", 0), ("b", 6), ("c", 6)),
        *_cases(
            "two blocks fit",
            *(("a", 20), ("c", 14), ("c", 0), ("a", 0)),
            *(("d", 10), ("e", 18)),
        ),
        *_cases(
            "which block",
            *(("a", 20), ("b", 8), ("c", 14), ("a", 0), ("c", 0), ("b", 0)),
            *(("d", 8), ("e", 12), ("f", 16)),
        ),
        *_cases("a block again", ("a", 20), ("a", 0), ("b", 6), ("b", 0), ("c", 18), ("d", 6)),
    ),
    fresh=_fresh,
    run=call_for_a_line,
    nudge="Two collections: live tensors, each with what it asked for and the block that it has, "
    "and cached blocks. To allocate: the smallest cached block that is large enough, as it is; if "
    "there is none, a new one, and `reserved` grows. To free: its block is cached.",
    misconceptions=(
        Misconception(
            "blocks are given back",
            _run(returned=True),
            "You give blocks back when they are freed. The allocator keeps them: to ask the driver "
            "for memory is slow, and the next step needs as much again.",
        ),
        Misconception(
            "blocks are given back, and gone",
            _run(returned=True, in_the_end=True),
            "You give blocks back when they are freed. The allocator keeps them: to ask the driver "
            "for memory is slow, and the next step needs as much again.",
        ),
        Misconception(
            "nothing is used again",
            _run(fits=lambda block, size: False),
            "You never use a block again. A freed one serves whoever fits into it.",
        ),
        Misconception(
            "of the same size alone",
            _run(fits=lambda block, size: block == size),
            "You use a block again for the very same size alone. It serves any tensor that fits.",
        ),
        Misconception(
            "any block",
            _run(fits=lambda block, size: True, pick=max),
            "You hand out blocks that are too small. The block must have at least the size asked "
            "for.",
        ),
        Misconception(
            "blocks are split",
            _run(after=_split),
            "You split blocks, and use what is left. This allocator hands them out whole: what is "
            "left within is lost while the tensor lives.",
        ),
        Misconception(
            "the largest block",
            _run(pick=max),
            "You take the largest block that is free. Take the smallest that is large enough, and "
            "leave the larger ones for larger tensors.",
        ),
        Misconception(
            "the first that fits",
            _run(pick=lambda fitting: fitting[0]),
            "You take the first block that fits. Take the smallest that is large enough.",
        ),
        Misconception(
            "the last that fits",
            _run(pick=lambda fitting: fitting[-1]),
            "You take the last block that fits. Take the smallest that is large enough.",
        ),
        Misconception(
            "the block shrinks",
            _run(freed=lambda size, block: size),
            "When a tensor goes you cache as much as it asked for. Its block was larger, and still "
            "is.",
        ),
        Misconception(
            "handed out twice",
            _run(after=lambda cached, block, size: block),
            "You hand out a block and leave it in the cache: two tensors would share it.",
        ),
        Misconception(
            "allocated at the end",
            _run(allocated=lambda history, blocks: history[-1]),
            "Your allocated is what is there at the end. Asked is the most at any moment.",
        ),
        Misconception(
            "blocks for tensors",
            _run(allocated=lambda history, blocks: max(blocks)),
            "Your allocated is the size of the blocks. Count what tensors asked for: the rest is "
            "lost within blocks, and reserved.",
        ),
        Misconception(
            "all that was asked for",
            _run(
                allocated=lambda history, blocks: sum(
                    max(0, b - a) for a, b in zip(history, history[1:], strict=False)
                )
            ),
            "Your allocated adds up all that was ever asked for. What was freed is not there any "
            "more.",
        ),
        Misconception(
            "no dict",
            lambda *args: tuple(run(*args).values()),
            'Your function does not return a dict with the keys "allocated" and "reserved".',
        ),
    ),
)
