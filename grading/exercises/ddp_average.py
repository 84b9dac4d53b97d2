"""Lesson 04, 04-average: the gradient of the whole batch."""

import torch
import torch.distributed as dist
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from course_lib.checks.exercise import Exercise, Misconception
from course_lib.sharded.ddp import DDP
from grading.exercises import small_model


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


def _halved(parameter):
    parameter.grad /= 2
    dist.all_reduce(parameter.grad)


def _without_wait(parameter):
    parameter.grad /= dist.get_world_size()
    dist.all_reduce(parameter.grad, async_op=True)


def _by_way_of_rank_0(parameter):
    _only_to_rank_0(parameter)
    dist.broadcast(parameter.grad, src=0)


def _gathered(parameter):
    of_all = [torch.empty_like(parameter.grad) for _ in range(dist.get_world_size())]
    dist.all_gather(of_all, parameter.grad)
    parameter.grad = sum(of_all) / len(of_all)


def _average_first(model, loss):
    for parameter in model.parameters():
        _averaged(parameter.grad)
    loss.backward()


def _average_loss(model, loss):
    total = loss.detach().clone()
    _averaged(total)
    (loss - loss.detach() + total).backward()  # the value of the average, the gradient of `loss`


def _sum_and_divide_loss(model, loss):
    dist.all_reduce(loss.detach())
    (loss / dist.get_world_size()).backward()


_LOSS = (
    "You average the loss. Backward knows nothing of other ranks: its gradient is still that of "
    "this rank's data."
)


AVERAGE = Exercise(
    id="04-average",
    title="Average the gradients of all ranks",
    task="Run backward, then leave the average over ranks in every parameter's grad.",
    points={"all": 3},
    reference=average_backward,
    library=(DDP.__init__,),
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
            _LOSS,
            "Average the gradients, after backward.",
        ),
        Misconception(
            "average of the loss, and its gradient divided",
            _sum_and_divide_loss,
            _LOSS,
            "Average the gradients, after backward.",
        ),
        Misconception(
            "on rank 0 alone",
            _each(_only_to_rank_0),
            "Only rank 0 has the average: dist.reduce brings it to one rank. Every rank takes the "
            "optimizer's step, so each needs it.",
        ),
        Misconception(
            "halved",
            _each(_halved),
            "You divide by 2, which is right for two ranks only.",
            "dist.get_world_size() says how many there are.",
        ),
        Misconception(
            "does not wait",
            _each(_without_wait),
            "You do not wait for every all_reduce that you start with async_op=True: whoever "
            "reads the gradients finds the sum, or a part of it, by chance.",
            "Keep each work, and call its wait(); or leave async_op out.",
        ),
        Misconception(
            "reduce and broadcast",
            _each(_by_way_of_rank_0),
            "The numbers are right, but you called reduce and broadcast: more messages than one "
            "all_reduce, and all of them pass through one rank.",
        ),
        Misconception(
            "all_gather",
            _each(_gathered),
            "The numbers are right, but you called all_gather: more bytes than one all_reduce, and "
            "memory for the gradients of every rank.",
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
