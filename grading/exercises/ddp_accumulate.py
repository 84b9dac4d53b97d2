"""Lesson 04, 04-accumulate: many micro-batches, one synchronisation."""

from contextlib import nullcontext

import torch.distributed as dist

from course_lib.checks.exercise import Exercise, Misconception
from grading.exercises import small_model


def accumulate(ddp, micro_batches):
    for number, batch in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        with nullcontext() if last else ddp.no_sync():
            loss = ddp(batch) / len(micro_batches)
            loss.backward()


def _divide_at_the_end(ddp, micro_batches):
    *early, last = micro_batches
    with ddp.no_sync():
        for batch in early:
            ddp(batch).backward()
    ddp(last).backward()
    for parameter in ddp.parameters():
        parameter.grad /= len(micro_batches)


def _accumulate(local=lambda i, n: i < n - 1, share=lambda n: n, zero=False):
    """The reference with one thing wrong. `local(i, n)`: is micro-batch i of n under no_sync?"""

    def answer(ddp, micro_batches):
        n = len(micro_batches)
        for i, batch in enumerate(micro_batches):
            if zero:
                ddp.zero_grad()
            with ddp.no_sync() if local(i, n) else nullcontext():
                (ddp(batch) / share(n)).backward()

    return answer


def _one_backward(ddp, micro_batches):
    (sum(map(ddp, micro_batches)) / len(micro_batches)).backward()


def _last_only(ddp, micro_batches):
    ddp(micro_batches[-1]).backward()


ACCUMULATE = Exercise(
    id="04-accumulate",
    title="Accumulate with one synchronisation",
    task="Run all micro-batches and leave the average gradient, with one synchronisation.",
    points={"all": 3},
    reference=accumulate,
    alternatives=(_divide_at_the_end,),
    cases=(small_model.job([2, 1], 2, seed=1, micro_batches=2),),
    fresh=lambda rng: [
        small_model.job([2, rng.randint(2, 5), 1], 3, rng.randrange(10**6), micro_batches=4)
    ],
    run=small_model.on_small_model(small_model.accumulated),
    compare=small_model.near,
    nudge="Under ddp.no_sync() gradients add up and nothing travels; leave it for the last one.",
    misconceptions=(
        Misconception(
            "a synchronisation for each micro-batch",
            _accumulate(local=lambda i, n: False),
            "The numbers are right, but every micro-batch is synchronised: as many times the "
            "communication for the same gradient. Put forward and backward both under no_sync, "
            "since the forward decides.",
            "Of all but the last micro-batch, both go under `with ddp.no_sync():`.",
        ),
        Misconception(
            "the plain loop",
            _accumulate(local=lambda i, n: False, share=lambda n: 1),
            "Two things are missing: all micro-batches but the last should stay local, and what "
            "they add up should be divided by their number.",
            "ddp.no_sync() for the first; loss / len(micro_batches) for the second.",
        ),
        Misconception(
            "no synchronisation",
            _accumulate(local=lambda i, n: True),
            "Nothing was synchronised: each rank has the gradient of its own data.",
            "The last micro-batch runs outside of no_sync.",
        ),
        Misconception(
            "the first one synchronised",
            _accumulate(local=lambda i, n: i > 0),
            "You synchronise the first micro-batch, and what is added afterwards stays on its "
            "rank. The last one has to carry the sum of all.",
        ),
        Misconception(
            "not divided",
            _accumulate(share=lambda n: 1),
            "Your gradient is the sum over micro-batches, which makes the step longer the more of "
            "them there are. The mean loss of the whole batch has their mean.",
            "Divide each loss by len(micro_batches).",
        ),
        Misconception(
            "divided by the ranks too",
            _accumulate(share=lambda n: n * dist.get_world_size()),
            "You divide by the number of ranks too. DDP has divided by the ranks; divide by "
            "len(micro_batches).",
        ),
        Misconception(
            "divided by the ranks instead",
            _accumulate(share=lambda n: dist.get_world_size()),
            "You divide by the number of ranks. DDP has divided by the ranks; divide by "
            "len(micro_batches).",
        ),
        Misconception(
            "zero_grad between micro-batches",
            _accumulate(zero=True),
            "You set the gradients to zero before each micro-batch: only the last one is left. To "
            "accumulate is not to do so.",
            "zero_grad once, before the first; here the gradients already are zero.",
        ),
        Misconception(
            "the last micro-batch only",
            _last_only,
            "You run the last micro-batch only: the others were loaded for nothing.",
        ),
        Misconception(
            "one backward for all",
            _one_backward,
            "The gradient is right, but the activations of all micro-batches were alive at once. "
            "Accumulation is there to save them: run backward after each forward.",
        ),
        Misconception(
            "one forward for all",
            lambda ddp, micro_batches: ddp(
                micro_batches[0].new_tensor(
                    [row for batch in micro_batches for row in batch.tolist()]
                )
            ).backward(),
            "You put the micro-batches together into one: the gradient is right, but all their "
            "activations are alive at once, which is what did not fit.",
        ),
    ),
)
