"""Lesson 05, 05-update: an optimizer of which each rank has 1/N."""

import torch

from course_lib.checks.exercise import Exercise, Misconception
from course_lib.sharded.zero1 import ZeRO1
from grading.exercises import sharded_run, small_model, zero1_runs
from grading.exercises import zero1_answers as answers

_DDP = (
    "The numbers are right, but this is DDP: each rank gets the mean of all gradients, and its "
    "optimizer has states for all parameters. Let this rank's optimizer see its shard alone."
)
_KEPT = (
    "The numbers are right, and so are the states; but as many bytes as the whole model has stay "
    "alive after the step. A slice is a view, which keeps the whole buffer behind it; so does "
    "whatever still refers to a flat buffer between steps."
)
_LET_GO = ".clone() the slice, and make the flat gradients inside update(), where they end with it."

UPDATE = Exercise(
    id="05-update",
    title="Update your shard only",
    task="Return update(): it reduce-scatters the mean gradient and updates this rank's shard.",
    points={"all": 5},
    reference=answers.sharded_optimizer,
    library=(ZeRO1.__init__,),
    alternatives=(
        answers.without_a_copy_between_steps,
        answers.in_two_pieces,
        answers.with_gradients_freed,
        answers.in_pieces_of_each_tensor,
    ),
    cases=(small_model.job([3, 4, 4, 2], 4, seed=1, steps=2, optimizer="SGD with momentum"),),
    fresh=lambda rng: [
        small_model.job(
            [5, 5, 5, rng.choice((1, 2))],  # 41 or 47 elements
            5,
            seed=rng.randrange(10**6),
            steps=2,
            optimizer="AdamW",
            tied=[0, 1],
        )
    ],
    run=small_model.on_small_model(zero1_runs.updated),
    compare=sharded_run.worded(small_model.near),
    nudge="Before training: clone this rank's slice of the padded parameters, and give it to the "
    "optimizer. In update: one reduce_scatter_single of padded gradients / N into shard.grad, then "
    "optimizer.step().",
    misconceptions=(
        Misconception(
            "DDP under another name",
            answers.ddp,
            _DDP,
            "make_optimizer([shard]), and reduce_scatter_single into shard.grad.",
        ),
        Misconception(
            "DDP under another name, in one flat tensor",
            answers.ddp_in_one_tensor,
            _DDP,
            "make_optimizer([shard]), and reduce_scatter_single into shard.grad.",
        ),
        Misconception(
            "a replicated optimizer",
            answers.replicated_states,
            "What you send is right, but your optimizer was made for all parameters, so its states "
            "are as large as DDP's on every rank: nothing is saved.",
            "Make it for [shard], an nn.Parameter of S elements.",
        ),
        Misconception(
            "all_reduce, then cut",
            answers.with_one_thing_wrong(reduce=answers.by_all_reduce),
            "The states are sharded, but you all_reduce the gradients and throw most of them away. "
            "Each rank needs its shard of the mean: a reduce_scatter, at half the bytes.",
        ),
        Misconception(
            "no communication",
            answers.with_one_thing_wrong(reduce=answers.own_alone, share=lambda: 1),
            "You update your shard by this rank's own gradient. The mean over ranks is wanted, and "
            "for that every rank has to send you what it has for your shard.",
            "dist.reduce_scatter_single(shard.grad, whole): rank r gets the sum of row r.",
        ),
        Misconception(
            "no communication, and divided",
            answers.with_one_thing_wrong(reduce=answers.own_alone),
            "You update your shard by this rank's own gradient, divided by N. The mean over ranks "
            "is wanted: every rank has to send you what it has for your shard.",
            "dist.reduce_scatter_single(shard.grad, whole): rank r gets the sum of row r.",
        ),
        Misconception(
            "SUM instead of AVG",
            answers.with_one_thing_wrong(share=lambda: 1),
            "This is the SUM of all ranks' gradients, which is N times too long. AdamW hides that; "
            "SGD does not, nor does a clipped norm.",
            "Divide by dist.get_world_size(), once, before the reduce_scatter or after it.",
        ),
        Misconception(
            "padding lost",
            answers.with_one_thing_wrong(pad=answers.rounded_down),
            "Your shards have P // N elements, so the last P % N parameters belong to nobody and "
            "are never updated. Round up, and pad with zeros.",
            "`padded(tensors)` has a length that N divides.",
        ),
        Misconception(
            "owners of whole tensors",
            answers.owners_of_whole_tensors,
            "Your shards differ in length, as where each rank owns whole tensors. Then one rank "
            "may own most of the model, and no single collective fits. Cut the flat buffer: S "
            "elements on every rank, wherever tensors end.",
            "`padded(model.parameters(), n).view(n, -1)` has a row of S elements for each rank.",
        ),
        Misconception(
            "a view",
            answers.with_one_thing_wrong(cut=zero1_runs.mine),
            _KEPT,
            _LET_GO,
        ),
        Misconception(
            "flat gradients never freed",
            answers.with_one_thing_wrong(keep=True),
            _KEPT,
            _LET_GO,
        ),
        Misconception(
            "a tied weight counted twice",
            answers.with_one_thing_wrong(listed=answers.of_each_layer),
            "Where two layers share a weight, you count it twice: it takes twice its bytes in the "
            "shards, and its gradient is there twice.",
            "model.parameters() gives each parameter once.",
        ),
        Misconception(
            "a gradient that the optimizer does not see",
            answers.with_one_thing_wrong(into=torch.empty_like),
            "Your optimizer finds no gradient, so it updates nothing: the mean has to be in "
            "shard.grad, and the optimizer made for [shard].",
            "shard.grad = torch.empty_like(shard), and reduce_scatter into it.",
        ),
        Misconception(
            "a new optimizer each time",
            answers.with_one_thing_wrong(new_optimizer=True),
            "The first step is right, but momentum and moments begin at zero in every step: you "
            "make the optimizer anew in update().",
            "Make it once, before update is defined.",
        ),
        Misconception(
            "gathers, too",
            answers.with_one_thing_wrong(returned=answers.gathered),
            "All is right, and you already gather the parameters, which is the next exercise. "
            "Return the shard, and leave the model's parameters as they are.",
        ),
        Misconception(
            "returns nothing",
            answers.with_one_thing_wrong(returned=lambda model, shard: None),
            "update() must return this rank's updated shard; yours returned None.",
            "return shard.detach() at the end of update().",
        ),
    ),
)
