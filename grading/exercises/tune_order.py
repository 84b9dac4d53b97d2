"""Lesson 09, 09-order: when each unit is sent for in backward, and when it computes."""

from course_lib.checks.exercise import Case, Exercise, Misconception


def backward(forward, prefetch):
    order, events = forward[::-1], []
    for i, unit in enumerate(order):
        for each in order[i : i + 1 + prefetch]:
            if f"gather {each}" not in events:
                events.append(f"gather {each}")
        events.append(f"compute {unit}")
    return events


def _with_a_queue(forward, prefetch):
    waiting, events, sent = list(forward), [], 0
    for computed, unit in enumerate(reversed(forward)):
        while waiting and sent <= computed + prefetch:
            events += ["gather " + waiting.pop()]
            sent += 1
        events += ["compute " + unit]
    return events


def _backward(
    order=lambda forward: forward[::-1],
    ahead=lambda order, i, prefetch: order[i : i + 1 + prefetch],
    late=False,
    once=True,
):
    """The reference with one thing wrong; `late`: those ahead are sent for after the compute."""

    def answer(forward, prefetch):
        turn, events = order(forward), []
        for i, unit in enumerate(turn):
            own, *others = [unit, *(x for x in ahead(turn, i, prefetch) if x != unit)]
            gathers, after = ([own], others) if late else ([own, *others], [])
            for step in (gathers, None, after):
                for each in [unit] if step is None else step:
                    event = f"{'compute' if step is None else 'gather'} {each}"
                    if not once or event not in events:
                        events.append(event)
        return events

    return answer


def _never_its_own(forward, prefetch):
    events = []
    for i, unit in enumerate(forward[::-1]):
        events += [f"gather {each}" for each in forward[::-1][i + 1 : i + 1 + prefetch]]
        events.append(f"compute {unit}")
    return list(dict.fromkeys(events))


def _case(forward: str, prefetch: int) -> Case:
    units = forward.split()
    return Case(f"{len(units)} units, prefetch {prefetch}", (units, prefetch))


ORDER = Exercise(
    id="09-order",
    title="Who is sent for when",
    task="Return backward's gathers and computes in the order in which they are issued.",
    points={"all": 3},
    reference=backward,
    alternatives=(_with_a_queue,),
    cases=(_case("a b c", 1), _case("a b c", 0), _case("a b c d", 2), _case("a", 1)),
    fresh=lambda rng: [_case(" ".join(rng.sample("pqrstuvw", 6)), rng.choice((2, 3)))],
    nudge="Turn forward's order around. For each unit: of it and the next `prefetch`, gather those "
    "that no gather has been issued for; then it computes.",
    misconceptions=(
        Misconception(
            "forward's order",
            _backward(order=list),
            "You go in forward's order. Backward begins with the unit that forward used last.",
        ),
        Misconception(
            "after the compute",
            _backward(late=True),
            "You send for the next units when a unit has computed. Then nothing travels while it "
            "computes: send first.",
        ),
        Misconception(
            "no prefetch",
            _backward(ahead=lambda order, i, prefetch: []),
            "Each unit is sent for when backward comes to it: then compute stands still for every "
            "one of them. Send for the next `prefetch` in backward's order, too: those that "
            "forward used before it.",
        ),
        Misconception(
            "one too many",
            _backward(ahead=lambda order, i, prefetch: order[i : i + 2 + prefetch]),
            "You are one unit further ahead than asked: `prefetch` units besides the one that "
            "computes.",
        ),
        Misconception(
            "one too few",
            _backward(ahead=lambda order, i, prefetch: order[i : i + max(1, prefetch)]),
            "You count the unit that computes among those ahead: `prefetch` units come besides it.",
        ),
        Misconception(
            "the furthest alone",
            _backward(ahead=lambda order, i, prefetch: order[i + prefetch : i + 1 + prefetch]),
            "You send for the unit that is `prefetch` ahead, and not for those between. At the "
            "start nobody has sent for these.",
        ),
        Misconception(
            "all at once",
            _backward(ahead=lambda order, i, prefetch: order),
            "You send for all units at once: then the whole model is gathered, and nothing is "
            "saved.",
        ),
        Misconception(
            "gathered again",
            _backward(once=False),
            "You gather units again that have been sent for. What is under way, or whole, is not "
            "gathered a second time.",
        ),
        Misconception(
            "the first is never gathered",
            _never_its_own,
            "You gather units ahead alone. Backward comes to the first one, which nobody has sent "
            "for, and with a prefetch of 0 to all of them: gather a unit that is not there yet.",
        ),
    ),
)
