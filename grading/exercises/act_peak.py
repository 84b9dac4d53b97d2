"""Lesson 02, 02-peak: the peak as a maximum over the moments of a step, and where it is."""

from course_lib import ledger
from course_lib.checks.exercise import Case, Exercise, Misconception, call_for_a_line

PARTS = {"at": 1, "bytes": 3}


def peak(held, layers, loss, update):
    now, moments = held + sum(layer["saved"] for layer in layers), {}
    moments["loss"] = now + loss
    for i in reversed(range(len(layers))):
        now += layers[i]["gradient"]
        moments[f"backward {i}"] = now + layers[i]["transient"]
        now -= layers[i]["saved"]
    moments["update"] = now + update
    at = max(moments, key=moments.get)
    return {"at": at, "bytes": moments[at]}


def _each_by_itself(held, layers, loss, update):
    """Every moment from its own sums, without a running one."""
    total = {key: sum(layer[key] for layer in layers) for key in ("saved", "gradient")}
    found = [(held + total["saved"] + loss, "loss"), (held + total["gradient"] + update, "update")]
    for i, layer in enumerate(layers):
        before = sum(each["saved"] for each in layers[: i + 1])
        after = sum(each["gradient"] for each in layers[i:])
        found.append((held + before + after + layer["transient"], f"backward {i}"))
    most, at = max(found)
    return {"bytes": most, "at": at}


def _peak(
    held_is=lambda held: held,
    loss_stays=False,
    order=lambda count: reversed(range(count)),
    gradient=lambda layer: layer["gradient"],
    saved_until_after=True,
    frees=lambda layer: layer["saved"],
    transient_stays=False,
    name=lambda i: f"backward {i}",
    moments_of=lambda moments: moments,
):
    """The reference with one thing wrong."""

    def answer(held, layers, loss, update):
        now = held_is(held) + sum(layer["saved"] for layer in layers)
        moments = {"loss": now + loss}
        now += loss if loss_stays else 0
        for i in order(len(layers)):
            layer = layers[i]
            now -= 0 if saved_until_after else frees(layer)
            now += gradient(layer)
            moments[name(i)] = now + layer["transient"]
            now += layer["transient"] if transient_stays else 0
            now -= frees(layer) if saved_until_after else 0
        moments["update"] = now + update
        chosen = moments_of(moments)
        at = max(chosen, key=chosen.get)
        return {"at": at, "bytes": chosen[at]}

    return answer


def _all_together(held, layers, loss, update):
    return {
        "at": "loss",
        "bytes": held + sum(sum(layer.values()) for layer in layers) + loss + update,
    }


def _without_update(moments):
    return {name: value for name, value in moments.items() if name != "update"}


def _only(name):
    return lambda moments: {name: moments[name]}


def _from_the_end(held, layers, loss, update):
    right = peak(held, layers, loss, update)
    word, _, i = right["at"].partition(" ")
    return right | ({"at": f"{word} {len(layers) - 1 - int(i)}"} if i else {})


def _at_rest(held, layers, loss, update):
    gradients = sum(layer["gradient"] for layer in layers)
    return {"at": "update", "bytes": held + gradients}


def _layers(*sizes: tuple[int, int, int]) -> list[dict[str, int]]:
    return [dict(zip(("saved", "gradient", "transient"), x, strict=True)) for x in sizes]


def _cases(name: str, held: int, layers: list, loss: int, update: int) -> list[Case]:
    return [Case(name, (held, layers, loss, update), part) for part in PARTS]


def _fresh(rng) -> list[Case]:
    """Blocks under a checkpoint: little is saved, so the peak is deep in backward."""
    layers = _layers(
        *[(rng.randrange(5, 20), rng.randrange(60, 90), rng.randrange(300, 500)) for _ in range(6)]
    )
    return _cases("six checkpointed layers", rng.randrange(100, 999), layers, 250, 60)


PEAK = Exercise(
    id="02-peak",
    title="When is the peak?",
    task="Return where in the step most bytes are there, and how many.",
    points=PARTS,
    reference=peak,
    alternatives=(_each_by_itself,),
    cases=(
        *_cases("much is saved", 100, _layers((50, 10, 8), (50, 10, 8), (50, 10, 8)), 30, 20),
        *_cases("little is saved", 100, _layers((5, 40, 60), (6, 41, 60), (7, 42, 60)), 30, 20),
        *_cases("one layer is wide", 10, _layers((9, 3, 4), (30, 5, 90), (9, 3, 4)), 12, 7),
        *_cases("a large update", 100, _layers((50, 30, 8), (50, 30, 8)), 1, 200),
    ),
    fresh=_fresh,
    run=call_for_a_line,
    library=(ledger.peak, ledger.timeline),
    nudge="Keep a running sum, and write down each moment in a dict: name to bytes. In backward of "
    "a layer its gradient and transient come while what it saved is still there; then what it "
    "saved and the transient go, and the gradient stays.",
    misconceptions=(
        Misconception(
            "all added up",
            _all_together,
            "You add up all that is ever there. Not all of it is there at once: the peak is the "
            "largest of the moments.",
        ),
        Misconception(
            "at the loss always",
            _peak(moments_of=_only("loss")),
            "You take the peak to be at the loss. Gradients grow in backward: where little is "
            "saved, there is more at its end, or in the update.",
        ),
        Misconception(
            "at the end of backward",
            _peak(moments_of=_only("backward 0")),
            "You take the peak to be at the end of backward. Where much is saved, it is gone by "
            "then.",
        ),
        Misconception(
            "the update forgotten",
            _peak(moments_of=_without_update),
            "You forgot the update: all gradients are there, and temporaries of the optimizer.",
        ),
        Misconception(
            "at rest",
            _at_rest,
            "You give what is there between steps, or before the update. A peak has what comes and "
            "goes.",
        ),
        Misconception(
            "states forgotten",
            _peak(held_is=lambda held: 0),
            "You forgot what is held all the time: parameters and optimizer states.",
        ),
        Misconception(
            "gradients forgotten",
            _peak(gradient=lambda layer: 0),
            "You let no gradient stay. Each layer's backward leaves one, until the update.",
        ),
        Misconception(
            "what was saved goes first",
            _peak(saved_until_after=False),
            "You let what a layer saved go before its backward has run. Backward needs it: it goes "
            "when gradient and transient have been there.",
        ),
        Misconception(
            "what was saved stays",
            _peak(frees=lambda layer: 0),
            "You keep what was saved until the end. Backward lets it go, layer by layer.",
        ),
        Misconception(
            "transients pile up",
            _peak(transient_stays=True),
            "Your transients pile up. Each goes with its layer's backward.",
        ),
        Misconception(
            "the loss stays",
            _peak(loss_stays=True),
            "You keep the loss's bytes through backward. They go before the last layer's backward "
            "begins.",
        ),
        Misconception(
            "backward in the order of forward",
            _peak(order=range),
            "Your backward begins with the first layer. It begins with the last one.",
        ),
        Misconception(
            "counted from the end",
            _from_the_end,
            "The name has the layer's place in `layers`: the last one, with which backward begins, "
            'is "backward 2" of three.',
        ),
        Misconception(
            "counted from one",
            _peak(name=lambda i: f"backward {i + 1}"),
            'Layers count from 0: the first one\'s moment is called "backward 0".',
        ),
        Misconception(
            "no dict",
            lambda *args: tuple(peak(*args).values()),
            'Your function does not return a dict with the keys "at" and "bytes".',
        ),
    ),
)
