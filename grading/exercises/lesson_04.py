"""Lesson 04, DDP and its redundancy: count it, average gradients; the rest is in `ddp_…`."""

import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from course_lib.checks.comparison import close
from course_lib.checks.exercise import Case, Exercise, Misconception, call_for_a_line
from grading.exercises import small_model
from grading.exercises.ddp_accumulate import ACCUMULATE
from grading.exercises.ddp_buckets import BUCKETS
from grading.exercises.ddp_hooks import HOOKS

# --- 04-redundancy: what is there more than once ------------------------------------------------


def redundancy(parameters, ranks):
    copy = 16 * parameters
    held = ranks * copy
    redundant = held - copy
    return {"held": held, "redundant": redundant, "fraction": redundant / held}


def _redundancy_by_fraction(parameters, ranks):
    fraction = 1 - 1 / ranks
    held = 16 * parameters * ranks
    return {"held": held, "redundant": round(held * fraction), "fraction": fraction}


def _redundancy(change):
    def answer(parameters, ranks):
        return redundancy(parameters, ranks) | change(16 * parameters, ranks)

    return answer


def _redundancy_cases(parameters: int, ranks: int) -> list[Case]:
    name = f"{parameters:,} parameters on {ranks} rank{'s' if ranks > 1 else ''}"
    return [Case(name, (parameters, ranks), part) for part in ("held", "redundant", "fraction")]


REDUNDANCY = Exercise(
    id="04-redundancy",
    title="Count what is held more than once",
    task="Return the bytes held by all ranks, the redundant ones, and their fraction.",
    points={"held": 1, "redundant": 1, "fraction": 1},
    reference=redundancy,
    alternatives=(_redundancy_by_fraction,),
    cases=(*_redundancy_cases(10, 4), *_redundancy_cases(1_000_000, 1)),
    fresh=lambda rng: _redundancy_cases(rng.randrange(10**6, 10**9), rng.randrange(3, 200)),
    run=call_for_a_line,
    compare=close(1e-9),
    nudge="One copy must be held somewhere. Whatever is held beyond it is redundant.",
    misconceptions=(
        Misconception(
            "one copy",
            _redundancy(lambda copy, n: {"held": copy, "redundant": 0, "fraction": 0.0}),
            "You count one copy. Under data parallelism each rank holds one of its own: count what "
            "all ranks hold together.",
        ),
        Misconception(
            "everything is redundant",
            _redundancy(lambda copy, n: {"redundant": n * copy, "fraction": 1.0}),
            "You call every copy redundant. One of them is needed: the model has to be somewhere.",
        ),
        Misconception(
            "the needed fraction",
            _redundancy(lambda copy, n: {"fraction": 1 / n}),
            "1/N is the fraction that is needed. The redundant one is what remains of 1.",
        ),
        Misconception(
            "relative to one copy",
            _redundancy(lambda copy, n: {"fraction": n - 1.0}),
            "You divided by one copy: that says how many copies too many there are. A fraction is "
            "a part of all that is held.",
        ),
        Misconception(
            "weights only",
            lambda p, n: redundancy(p / 8, n),
            "You count 2 bytes per parameter, the weights. Gradients and optimizer states are held "
            "on every rank too: 16 bytes.",
        ),
        Misconception(
            "percent",
            _redundancy(lambda copy, n: {"fraction": 100 - 100 / n}),
            "You give percent. A fraction lies between 0 and 1.",
        ),
        Misconception(
            "per rank",
            _redundancy(lambda copy, n: {"redundant": copy - copy / n}),
            "You give the redundant bytes of one rank; asked is the sum over all ranks.",
        ),
    ),
)

# --- 04-average: the gradient of the whole batch ------------------------------------------------


def average_backward(model, loss):
    loss.backward()
    for parameter in model.parameters():
        parameter.grad /= dist.get_world_size()
        dist.all_reduce(parameter.grad)


def _average_flat(model, loss):
    loss.backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = parameters_to_vector(gradients)
    dist.all_reduce(flat)
    vector_to_parameters(flat / dist.get_world_size(), gradients)


def _each(reduce):
    """Backward, then `reduce(parameter)` for each parameter."""

    def answer(model, loss):
        loss.backward()
        for parameter in model.parameters():
            reduce(parameter)

    return answer


def _averaged(tensor):
    tensor /= dist.get_world_size()
    dist.all_reduce(tensor)


def _only_to_rank_0(parameter):
    parameter.grad /= dist.get_world_size()
    dist.reduce(parameter.grad, dst=0)


def _divided_twice(parameter):
    _averaged(parameter.grad)
    parameter.grad /= dist.get_world_size()


def _matrices_only(parameter):
    if parameter.dim() > 1:
        _averaged(parameter.grad)


def _only_on_rank_0(parameter):
    if dist.get_rank() == 0:
        _averaged(parameter.grad)


def _weights_too(parameter):
    _averaged(parameter.grad)
    _averaged(parameter.data)


def _average_first(model, loss):
    for parameter in model.parameters():
        _averaged(parameter.grad)
    loss.backward()


def _average_loss(model, loss):
    total = loss.detach().clone()
    _averaged(total)
    (loss - loss.detach() + total).backward()  # the value of the average, the gradient of `loss`


AVERAGE = Exercise(
    id="04-average",
    title="Average the gradients of all ranks",
    task="Run backward, then leave the average over ranks in every parameter's grad.",
    points={"all": 3},
    reference=average_backward,
    alternatives=(_average_flat,),
    cases=(small_model.job([2, 3, 1], 2, seed=1),),
    fresh=lambda rng: [small_model.job([2, rng.randint(2, 5), 2], 3, seed=rng.randrange(10**6))],
    run=small_model.on_small_model(small_model.average),
    compare=small_model.near,
    nudge="After backward, all_reduce each parameter.grad and divide once by the number of ranks.",
    misconceptions=(
        Misconception(
            "no communication",
            _each(lambda parameter: None),
            "Each rank keeps the gradient of its own data: nothing was communicated, and the "
            "copies of the model would drift apart at the first step.",
            "dist.all_reduce(parameter.grad) adds up over the ranks, in place.",
        ),
        Misconception(
            "no backward",
            lambda model, loss: [_averaged(parameter.grad) for parameter in model.parameters()],
            "Backward never ran, so there is no gradient to average.",
            "loss.backward() comes first.",
        ),
        Misconception(
            "SUM instead of AVG",
            _each(lambda parameter: dist.all_reduce(parameter.grad)),
            "This is the SUM over the ranks, N times too long: adding ranks would raise the "
            "learning rate. The whole batch's mean loss has the average as its gradient.",
            "Divide by dist.get_world_size(), before the all_reduce or after it.",
        ),
        Misconception(
            "weights instead of gradients, or a copy",
            _each(lambda parameter: _averaged(parameter.data)),
            "You communicated, but parameter.grad, which the optimizer reads, is untouched. The "
            "weights are equal on all ranks, so averaging them does nothing, and neither does "
            "averaging a copy of the gradient.",
            "The tensor to all_reduce is parameter.grad itself.",
        ),
        Misconception(
            "weights as well as gradients",
            _each(_weights_too),
            "The gradients are right, but you send the weights too, twice the bytes for nothing: "
            "equal weights and equal gradients stay equal through the optimizer's step.",
        ),
        Misconception(
            "average before backward",
            _average_first,
            "You average before backward, when the gradients are not there yet: what travels is "
            "what was in grad before.",
            "loss.backward() comes first.",
        ),
        Misconception(
            "average of the loss",
            _average_loss,
            "You average the loss. Backward knows nothing of other ranks: its gradient is still "
            "that of this rank's data.",
            "Average the gradients, after backward.",
        ),
        Misconception(
            "on rank 0 alone",
            _each(_only_to_rank_0),
            "Only rank 0 has the average: dist.reduce brings it to one rank. Every rank takes the "
            "optimizer's step, so each needs it.",
        ),
        Misconception(
            "divided twice",
            _each(_divided_twice),
            "You divide by the number of ranks twice.",
        ),
        Misconception(
            "parameters left out",
            _each(_matrices_only),
            "Some parameters were left out: the biases keep this rank's own gradient, and the "
            "copies drift apart slowly, which no error reports.",
            "Go through all of model.parameters().",
        ),
        Misconception(
            "a collective that only some ranks call",
            _each(_only_on_rank_0),
            "The ranks do not call the same collectives in the same order, so those that do call "
            "one wait for the others for ever.",
            "No collective under an `if` that depends on the rank or on its data.",
        ),
    ),
)

EXERCISES = (REDUNDANCY, AVERAGE, BUCKETS, HOOKS, ACCUMULATE)
