"""A small model on ranks, each of which has data of its own: what lesson 04's answers work on.

Only numbers cross to the ranks; each builds the model and its own data there, from the case's
seed. What comes back is what an answer did: the gradients that it left, and what it communicated,
in the order in which it did so. No times: an order is the same on every machine.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from course_lib import ranks
from course_lib.checks.comparison import close
from course_lib.checks.exercise import Answer, Case
from course_lib.checks.on_ranks import on_ranks
from course_lib.sharded.ddp import DDP

SAMPLES = 2  # of each rank, in each batch
DIGITS = 6  # of what comes back

near = close(1e-4, 3 * 10**-DIGITS)  # how an exercise compares it


class Regression(nn.Module):
    """A multi-layer perceptron with its loss inside: `model(batch)` is the mean squared error.

    batch: [samples, inputs + outputs], targets beside inputs.
    """

    def __init__(self, widths: Sequence[int]):
        super().__init__()
        self.inputs = widths[0]
        self.layers = nn.ModuleList(map(nn.Linear, widths, widths[1:]))

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        hidden, targets = batch[:, : self.inputs], batch[:, self.inputs :]
        for layer in self.layers:
            hidden = layer(hidden).tanh()
        return (hidden - targets).square().mean()


def job(widths: list[int], n_ranks: int, seed: int, **more: object) -> Case:
    """A case: a model of these widths on `n_ranks` ranks; `more` is what else the runner needs."""
    layers = len(widths) - 1
    given = f"a model of {layers} layer{'s' * (layers > 1)}, and on each rank data of its own"
    about = {"widths": widths, "ranks": n_ranks, "seed": seed} | more
    return Case(f"{n_ranks} ranks", (about,), given=given)


def on_small_model(one_rank: Callable) -> Callable[[Answer, Case], object]:
    """A runner for Exercise.run: `one_rank(answer, job)` on each of the job's ranks."""

    def run(answer: Answer, case: Case) -> object:
        (job,) = case.args
        inputs = [[job]] * job["ranks"]
        return on_ranks(functools.partial(one_rank, answer), replace(case, args=(inputs,)))

    return run


def average(answer: Answer, job: dict) -> dict:
    """`answer(model, loss)` after the forward: what it left, and the bytes that it sent.

    Gradients are given only if every collective was waited for, as in `overlapped`.
    """
    model, (batch,) = _built(job)
    before = _issued()
    waited = _note_waits()
    early = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: early.append(_issued() - before))
    answer(model, model(batch))
    payloads = Counter()
    for entry in ranks.entries()[before:]:
        payloads[entry.kind] += entry.payload
    all_waited = len(waited) == _issued() - before
    return {
        "waited for all that it started": all_waited,
        "gradients": _gradients(model) if all_waited else {},
        "weights": _numbers(dict(model.named_parameters())),
        "bytes": dict(payloads),
        "collectives before backward": early[0] if early else None,
    }


def overlapped(answer: Answer, job: dict) -> dict:
    """`finish = answer(buckets)`, then twice a backward and `finish()`.

    For each: the bytes of every all_reduce in order; how many had been started, and how many waited
    for, when a gradient became ready, as seen by a hook that runs before the answer's. Gradients
    are given only if every all_reduce was waited for: without that, what they hold is chance.
    """
    model, batches = _built(job, batches=2)
    parameters = list(model.parameters())
    waited = _note_waits()
    started: list[int] = []
    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(lambda _: started.append(_issued()))
    first = parameters[0]  # its gradient comes last
    in_backward = []
    first.register_post_accumulate_grad_hook(lambda _: in_backward.append(len(waited)))
    finish = answer([[parameters[index] for index in bucket] for bucket in job["buckets"]])
    if not callable(finish):  # no error: one that crosses from a rank brings its traceback along
        return {f"overlap must return the function finish; yours returned {finish!r:.80}": {}}
    steps = {}
    for number, batch in enumerate(batches, start=1):
        model.zero_grad(set_to_none=False)
        before = _issued()
        waited.clear(), started.clear()
        model(batch).backward()
        finish()
        sent = [entry.payload for entry in ranks.entries()[before:]]
        steps[f"step {number}"] = {
            "all_reduces": sent,
            "started before each gradient": [count - before for count in started],
            "waited for during backward": in_backward[-1],
            "waited for in all": len(waited),
            "gradients": _gradients(model) if len(waited) == len(sent) else {},
        }
    return steps


def _issued() -> int:
    """How many collectives this rank has issued."""
    return len(ranks.entries())


def _note_waits() -> dict[int, dist.Work]:
    """From now on, what this rank waits for, by id; kept alive, so that no id comes twice."""
    waited, wait = {}, dist.Work.wait

    def noted(work, *args, **options):
        waited[id(work)] = work
        return wait(work, *args, **options)

    dist.Work.wait = noted
    return waited


def accumulated(answer: Answer, job: dict) -> dict:
    """`answer(ddp, micro_batches)`: what it left, the order of its work, and what it sent."""
    model, micro_batches = _built(job, batches=job["micro_batches"])
    ddp = DDP(model, bucket_bytes=1, first_bucket_bytes=1)  # each tensor is its own bucket
    events: list[str] = []
    model.register_forward_pre_hook(
        lambda _, args: events.append(f"forward of {len(args[0])} samples")
    )
    first = next(model.parameters())  # its gradient comes last
    first.register_post_accumulate_grad_hook(lambda _: events.append("backward"))
    before = _issued()
    answer(ddp, micro_batches)
    kinds = Counter(entry.kind for entry in ranks.entries()[before:])
    return {
        "gradients": _gradients(model),
        "order": ", ".join(events),
        "all_reduces for each tensor": kinds["all_reduce"] / len(list(model.parameters())),
    }


def _built(job: dict, batches: int = 1) -> tuple[Regression, list[torch.Tensor]]:
    """The model, the same on every rank, its gradients 0; and this rank's batches."""
    widths = job["widths"]
    torch.manual_seed(job["seed"])
    model = Regression(widths)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.manual_seed(1000 * job["seed"] + dist.get_rank())
    return model, [torch.randn(SAMPLES, widths[0] + widths[-1]) for _ in range(batches)]


def _gradients(model: nn.Module) -> dict[str, list | None]:
    return _numbers({name: parameter.grad for name, parameter in model.named_parameters()})


def _numbers(tensors: dict[str, torch.Tensor | None]) -> dict[str, list | None]:
    """As lists, with as many digits as a reader of a report can use."""
    return {
        name: None if tensor is None else tensor.detach().double().numpy().round(DIGITS).tolist()
        for name, tensor in tensors.items()
    }
