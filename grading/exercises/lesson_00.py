"""Lesson 00, Start here: bytes, ranks, one all-reduce, and the first ledger."""

from random import Random

import torch
import torch.distributed as dist

from course_lib.checks.comparison import close
from course_lib.checks.exercise import Case, Exercise, Misconception
from course_lib.checks.on_ranks import on_ranks

# --- 00-gib: bytes to GiB ---------------------------------------------------------------------


def gib(n_bytes):
    return n_bytes / 2**30


def _gib_by_shift(n_bytes):
    return n_bytes / (1 << 10) / (1 << 10) / (1 << 10)


GIB = Exercise(
    id="00-gib",
    title="Bytes to GiB",
    task="Return the number of bytes as GiB: divide by 2**30.",
    points={"all": 1},
    reference=gib,
    alternatives=(_gib_by_shift,),
    cases=(
        Case("1 GiB", (2**30,)),
        Case("half a GiB", (2**29,)),
        Case("80e9 bytes", (80 * 10**9,)),
    ),
    fresh=lambda rng: [
        Case(f"{n:,} bytes", (n,)) for n in (rng.randrange(1, 2**38) for _ in "abc")
    ],
    compare=close(1e-9),
    misconceptions=(
        Misconception(
            "decimal GB",
            lambda n: n / 10**9,
            "You divided by 10^9: that gives GB, which GPU makers and papers use. A GiB is 2^30 "
            "bytes, 7.4% more.",
            "2**30 is 1,073,741,824.",
        ),
        Misconception(
            "MiB",
            lambda n: n / 2**20,
            "You divided by 2^20: that gives MiB. A GiB is 1024 MiB.",
            "Each prefix, Ki, Mi, Gi, is one more factor of 2**10.",
        ),
        Misconception(
            "decimal MB",
            lambda n: n / 10**6,
            "You divided by 10^6: that gives MB. A GiB is 2^30 bytes.",
            "Gi stands for 2**30, M for 10**6.",
        ),
        Misconception(
            "integer division",
            lambda n: n // 2**30,
            "You divided with //, which throws away the part of a GiB that is left over.",
            "Use / so that half a GiB is 0.5.",
        ),
        Misconception(
            "rounded",
            lambda n: round(n / 2**30, 2),
            "You rounded. Return the number as it is; rounding is for the screen.",
            "Leave out `round`.",
        ),
        Misconception(
            "bits",
            lambda n: n * 8 / 2**30,
            "You counted bits: the argument is in bytes already.",
            "Network speeds are often in bits, memory is in bytes: only those need a factor of 8.",
        ),
        Misconception(
            "multiplied",
            lambda n: n * 2**30,
            "You multiplied by 2^30: that turns GiB into bytes, the other way round.",
            "One GiB holds many bytes, so the number of GiB is the smaller one.",
        ),
    ),
)

# --- 00-greet: who am I? ----------------------------------------------------------------------


def greet():
    return f"rank {dist.get_rank()} of {dist.get_world_size()}"


def _greet_by_words():
    words = ("rank", str(dist.get_rank()), "of", str(dist.get_world_size()))
    return " ".join(words)


def _ranks_case(inputs: list[list]) -> Case:
    """One rank for each list of arguments."""
    held = (f"rank {r} has {mine[0]}" for r, mine in enumerate(inputs) if mine)
    return Case(f"{len(inputs)} ranks", (inputs,), given=", ".join(held) or "no arguments")


GREET = Exercise(
    id="00-greet",
    title="Four ranks say who they are",
    task="Return 'rank R of W' with this rank's number and the number of ranks.",
    points={"all": 1},
    reference=greet,
    alternatives=(_greet_by_words,),
    cases=(_ranks_case([[]] * 2), _ranks_case([[]] * 3)),
    run=on_ranks,
    misconceptions=(
        Misconception(
            "always rank 0",
            lambda: f"rank 0 of {dist.get_world_size()}",
            "Every rank says that it is rank 0. All ranks run the same code; what differs is what "
            "`dist.get_rank()` gives.",
            "Ask `torch.distributed` inside the function, where each rank gets its own answer.",
        ),
        Misconception(
            "counts from one",
            lambda: f"rank {dist.get_rank() + 1} of {dist.get_world_size()}",
            "You count ranks from 1. In torch.distributed they are numbered from 0 to W-1.",
            "Use `dist.get_rank()` as it is.",
        ),
        Misconception(
            "world size fixed at four",
            lambda: f"rank {dist.get_rank()} of 4",
            "The number of ranks is written into your code as 4; the same code must run on any "
            "number of ranks.",
            "`dist.get_world_size()` tells how many there are.",
        ),
        Misconception(
            "only the number",
            lambda: dist.get_rank(),
            "You return the rank's number alone; return the sentence 'rank R of W'.",
            'An f-string does it: f"rank {…} of {…}".',
        ),
        Misconception(
            "prints instead of returning",
            lambda: print(f"rank {dist.get_rank()} of {dist.get_world_size()}"),
            "Your function returns nothing. What a rank prints is only shown; what it returns "
            "comes back from `ranks.run`.",
            "Put `return` where `print` stands.",
        ),
        Misconception(
            "rank and world size swapped",
            lambda: f"rank {dist.get_world_size()} of {dist.get_rank()}",
            "Rank and number of ranks are swapped.",
            "`dist.get_rank()` is who I am, `dist.get_world_size()` how many we are.",
        ),
    ),
)

# --- 00-sum: one all-reduce -------------------------------------------------------------------


def global_sum(mine):
    total = mine.clone()
    dist.all_reduce(total, op=dist.ReduceOp.SUM)
    return total


def _sum_by_gathering(mine):
    everyones = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, mine)
    return torch.stack(everyones).sum(dim=0)


def _reduced(op):
    def answer(mine):
        total = mine.clone()
        dist.all_reduce(total, op=op)
        return total

    return answer


def _only_rank_0(mine):
    total = mine.clone()
    dist.reduce(total, dst=0)
    return total if dist.get_rank() == 0 else mine


def _rank_0s(mine):
    total = mine.clone()
    dist.broadcast(total, src=0)
    return total


def _fresh_tensors(rng: Random) -> list[Case]:
    n = rng.choice((3, 4))
    inputs = [[[round(rng.uniform(-9, 9), 3) for _ in range(3)]] for _ in range(n)]
    return [_ranks_case(inputs)]


SUM = Exercise(
    id="00-sum",
    title="A sum over all ranks",
    task="Return the sum of `mine` over all ranks, the same on every rank.",
    points={"all": 2},
    reference=global_sum,
    alternatives=(_sum_by_gathering,),
    cases=(_ranks_case([[[1.0, 2.0]], [[10.0, 20.0]]]),),
    fresh=_fresh_tensors,
    run=on_ranks,
    compare=close(1e-5, 1e-5),
    misconceptions=(
        Misconception(
            "no communication",
            lambda mine: mine,
            "Each rank returns its own tensor: nothing was communicated. No rank can know "
            "another's numbers without a collective.",
            "`dist.all_reduce(tensor)` adds up the tensors of all ranks, in place, on every rank.",
        ),
        Misconception(
            "own value times world size",
            lambda mine: mine * dist.get_world_size(),
            "You multiplied your own tensor by the number of ranks, which is the sum only if all "
            "ranks hold the same. Here each holds its own.",
            "The ranks have to communicate: `dist.all_reduce`.",
        ),
        Misconception(
            "mean",
            lambda mine: global_sum(mine) / dist.get_world_size(),
            "That is the mean over the ranks; the sum is asked for.",
            "Leave out the division. (Gradients are averaged; that is the next exercise.)",
        ),
        Misconception(
            "maximum",
            _reduced(dist.ReduceOp.MAX),
            "You reduced with MAX: that keeps the largest value of each element.",
            "The default operation of `dist.all_reduce` is SUM.",
        ),
        Misconception(
            "result on rank 0 only",
            _only_rank_0,
            "Only rank 0 has the sum. `dist.reduce` brings the result to one rank, "
            "`dist.all_reduce` to all.",
            "Every rank must return the sum.",
        ),
        Misconception(
            "what all_reduce returns",
            lambda mine: dist.all_reduce(mine.clone()),
            "You return what `dist.all_reduce` returns, which is None: it puts the sum into the "
            "tensor that it is given.",
            "Call it on a clone, in a line of its own, and return the clone.",
        ),
        Misconception(
            "broadcast",
            _rank_0s,
            "Every rank returns rank 0's tensor: a broadcast copies, it does not add.",
            "Use a collective that reduces: `dist.all_reduce`.",
        ),
    ),
)

# --- 00-average: repair a broken answer ---------------------------------------------------------


def average_gradient(grad):
    total = grad.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


def _average_divide_first(grad):
    share = grad / dist.get_world_size()
    dist.all_reduce(share)
    return share


def _divided_twice(grad):
    return average_gradient(grad) / dist.get_world_size()


AVERAGE = Exercise(
    id="00-average",
    title="Repair a gradient average",
    task="Return the average of `grad` over all ranks, the same on every rank.",
    points={"all": 2},
    reference=average_gradient,
    alternatives=(_average_divide_first,),
    cases=(_ranks_case([[[1.0, 2.0]], [[3.0, 6.0]]]),),
    fresh=_fresh_tensors,
    run=on_ranks,
    compare=close(1e-5, 1e-5),
    misconceptions=(
        Misconception(
            "sum instead of average",
            global_sum,
            "This is the SUM over the ranks. Data parallelism needs the average: with the sum, "
            "the step grows with the number of ranks.",
            "Divide by `dist.get_world_size()`, before or after the all-reduce.",
        ),
        Misconception(
            "divided by a fixed four",
            lambda grad: global_sum(grad) / 4,
            "You divide by 4 whatever the number of ranks is.",
            "`dist.get_world_size()` tells how many ranks there are.",
        ),
        Misconception(
            "no all-reduce",
            lambda grad: grad / dist.get_world_size(),
            "You divided, but nothing was communicated: each rank returns a share of its own.",
            "The shares have to be added up: `dist.all_reduce`.",
        ),
        Misconception(
            "untouched",
            lambda grad: grad,
            "Each rank returns its own gradient: the replicas would drift apart at the first step.",
            "Add up with `dist.all_reduce`, then divide.",
        ),
        Misconception(
            "divided twice",
            _divided_twice,
            "You divided by the number of ranks twice.",
            "Divide before the all-reduce or after it, once.",
        ),
        Misconception(
            "averaged over elements too",
            lambda grad: average_gradient(grad).mean(),
            "You averaged over the elements of the gradient too. Each element keeps its own "
            "average over the ranks; the shape stays.",
            "Leave out `.mean()`.",
        ),
    ),
)

# --- 00-headroom: read a ledger -----------------------------------------------------------------


def headroom(ledger, gpu_bytes):
    return gpu_bytes - sum(ledger.values())


def _headroom_by_name(ledger, gpu_bytes):
    for category in ("parameters", "gradients", "optimizer_states"):
        gpu_bytes -= ledger[category]
    return gpu_bytes


def _fresh_ledgers(rng: Random) -> list[Case]:
    return [
        _ledger_case(rng.randrange(10**9, 10**10), 80 * 2**30, sizes=rng.sample(range(1, 20), 3))
        for _ in range(3)
    ]


def _ledger_case(parameters: int, gpu_bytes: int, sizes=(2, 4, 12)) -> Case:
    """The three sizes differ, so that no line can stand in for another."""
    categories = ("parameters", "gradients", "optimizer_states")
    ledger = {name: size * parameters for name, size in zip(categories, sizes, strict=True)}
    return Case(f"{parameters:,} parameters", (ledger, gpu_bytes))


HEADROOM = Exercise(
    id="00-headroom",
    title="Read a ledger",
    task="Return how many bytes the GPU has left beside the ledger's three lines.",
    points={"all": 2},
    reference=headroom,
    alternatives=(_headroom_by_name,),
    cases=(_ledger_case(1_000_000, 24 * 2**30), _ledger_case(7_500_000_000, 80 * 2**30)),
    fresh=_fresh_ledgers,
    nudge="Add up the three lines and subtract the sum from the GPU's bytes.",
    misconceptions=(
        Misconception(
            "gradients forgotten",
            lambda led, gpu: gpu - led["parameters"] - led["optimizer_states"],
            "You left out the gradients: between backward and the step they are as resident as the "
            "parameters.",
        ),
        Misconception(
            "parameters taken for gradients",
            lambda led, gpu: gpu - 2 * led["parameters"] - led["optimizer_states"],
            "You counted the parameters twice and never read the gradients.",
        ),
        Misconception(
            "weights only",
            lambda led, gpu: gpu - led["parameters"],
            "You counted the weights alone. In training they are the small part: gradients and "
            "optimizer states come on top.",
        ),
        Misconception(
            "optimizer states forgotten",
            lambda led, gpu: gpu - led["parameters"] - led["gradients"],
            "You left out the optimizer states, the largest of the three.",
        ),
        Misconception(
            "bytes used",
            lambda led, gpu: sum(led.values()),
            "That is what the ledger uses; asked is what the GPU has left.",
        ),
        Misconception(
            "sign reversed",
            lambda led, gpu: sum(led.values()) - gpu,
            "The sign is the wrong way round: room left is positive, an overrun negative.",
        ),
        Misconception(
            "clamped at zero",
            lambda led, gpu: max(0, gpu - sum(led.values())),
            "You return 0 where the ledger does not fit. By how much it does not fit is what tells "
            "how much must be sharded: return the negative number.",
        ),
    ),
)

EXERCISES = (GIB, GREET, SUM, AVERAGE, HEADROOM)
