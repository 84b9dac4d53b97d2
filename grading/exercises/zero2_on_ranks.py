"""What lesson 06's answers are put through on a rank, beside what `sharded_run` measures.

That the numbers are right is the least of it. ZeRO-2 is about when a whole gradient is alive, and
for how long: so these note, as each gradient becomes ready or each collective is waited for, what
is in memory, and what has been sent. Meanwhile memory that nobody has written to is NaN, so that
torch.empty is not right by luck. Each is a `one_rank(answer, job)` for
`small_model.on_small_model`; the job's "bucket" is in elements, and small against the model.
"""

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from course_lib import ranks
from course_lib.checks.exercise import Answer
from course_lib.sharded.flat import Bucket, Flat
from grading.exercises import sharded_run, small_model
from grading.exercises.sharded_run import ShardedRun

near = sharded_run.worded(small_model.near)


def reduced(answer: Answer, job: dict) -> dict:
    """`answer(flat)` after a backward: the shard that it returned."""
    model, (batch,) = sharded_run.built(job)
    flat = flat_space(model, job)
    model(batch).backward()
    run = _Run(model)
    most = run.most_at_waits()
    before = _issued()
    sharded_run.fill_new_memory()
    with run.step():
        shard = answer(flat)
    number = _issued() - before
    report = run.report({"the shard": shard})
    report["collectives"]["number"] = number
    report["moments"] = {"beside grad, a whole copy at once": most() >= run.size}
    held = report["resident"]["gradients"]
    report["resident"]["gradients"] = held if held > run.size else "at most the model's"
    return _readable(report)


def freed(answer: Answer, job: dict) -> dict:
    """`answer(flat, shard)`, which registers hooks; then two backwards, each into zeros."""
    model, batches = sharded_run.built(job)
    flat = flat_space(model, job)
    shard = torch.zeros(flat.shard_size)
    run = _Run(model)
    seen = _Gradients(model, run)
    sharded_run.fill_new_memory()
    answer(flat, shard)
    values = {}
    for number, batch in enumerate(batches, start=1):
        model.zero_grad()
        shard.zero_()
        loss = model(batch)
        seen.begin()
        with run.step():
            loss.backward()
        values[f"the shard after backward {number}"] = _rounded(shard)
    issued = seen.issued_now()
    early = seen.issued[-1] if seen.issued else 0
    report = run.report(values)
    report["collectives"]["number"] = issued
    report["moments"] = {
        "reduced before the last gradient": _share(early, len(flat.buckets)),
        "whole gradients alive at once": _share(seen.most, run.size),
        "a whole copy, or near, beside them": 2 * seen.most_beside > run.size,
    }
    return _readable(report)


def accumulated(answer: Answer, job: dict) -> dict:
    """`answer(model, backward, micro_batches)`: the order of its work, and what was alive."""
    model, micro_batches = sharded_run.built(job)
    flat = flat_space(model, job)
    run = _Run(model)
    seen, backward = _Gradients(model), ShardedBackward(flat, run)
    order, whole = [], []
    first = next(model.parameters())  # its gradient comes last
    model.register_forward_pre_hook(lambda _, a: order.append(f"forward of {len(a[0])} samples"))
    model.register_forward_pre_hook(lambda *_: whole.append(seen.alive() > 0))
    first.register_post_accumulate_grad_hook(lambda _: order.append("backward"))
    sharded_run.fill_new_memory()
    with run.step():
        total = answer(model, backward, micro_batches)
    shards = backward.most // (4 * flat.shard_size)
    report = run.report({"the shard": total})
    report["moments"] = {
        "order": ", ".join(order),
        "whole gradients between micro-batches": any(whole),
        "shards alive at once": shards if shards > 3 else "at most 3",
    }
    return _readable(report)


class _Run(ShardedRun):
    """Looks at what an answer has in memory while it works, too."""

    def alive(self, but_for: Iterable[torch.UntypedStorage] = ()) -> int:
        """Bytes of all that is alive, but for what was before, the model's grad and `but_for`."""
        for work in [w for w in self._waited.values() if w is not None]:
            self._waited.pop(id(work))  # it keeps its tensors alive
            self._waited[object()] = None  # yet counts as waited for
            del work
        known = {storage.data_ptr() for storage in but_for}
        for tensor in (*self._before, *self.model.parameters()):
            known.add(tensor.untyped_storage().data_ptr())
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                known.add(parameter.grad.untyped_storage().data_ptr())
        found = {}
        for each in gc.get_objects():
            if isinstance(each, torch.Tensor):
                storage = each.untyped_storage()
                if storage.data_ptr() not in known:
                    found[storage.data_ptr()] = storage.nbytes()
        return sum(found.values())

    def most_at_waits(self) -> Callable[[], int]:
        """From now on look whenever a collective is waited for; gives the most that was alive."""
        most, wait = [0], dist.Work.wait

        def looked(work, *args, **options):
            most.append(self.alive())
            return wait(work, *args, **options)

        dist.Work.wait = looked
        return lambda: max(most)


def flat_space(model: nn.Module, job: dict) -> Flat:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    return Flat([list(model.parameters())], rank, world_size, bucket_bytes=4 * job["bucket"])


class ShardedBackward:
    """`backward(loss)` gives this rank's shard of the mean gradients [S], and frees the rest.

    A gradient that was there before is reduced along. `most` bytes were alive at once when this
    gave a shard, with that one.
    """

    def __init__(self, flat: Flat, run: _Run) -> None:
        self._flat, self._run, self.most = flat, run, 0
        self._shard: torch.Tensor | None = None
        self._wholes: dict[Bucket, tuple[torch.Tensor, int]] = {}
        for parameter in flat.parameters:
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        self._shard = torch.zeros(self._flat.shard_size)
        loss.backward()
        shard, self._shard = self._shard, None
        self.most = max(self.most, self._run.alive())
        return shard

    @torch.no_grad()
    def _on_gradient(self, parameter: nn.Parameter) -> None:
        if self._shard is None:
            return  # the model's own backward
        for bucket in self._flat.buckets:
            for part in bucket.parts:
                if part.parameter is parameter:
                    whole, to_come = self._wholes.pop(
                        bucket, (torch.zeros(bucket.size), len(bucket.parts))
                    )
                    whole[part.place] = part.of(parameter.grad) / dist.get_world_size()
                    if to_come > 1:
                        self._wholes[bucket] = whole, to_come - 1
                    else:
                        piece = torch.empty(bucket.size // dist.get_world_size())
                        dist.reduce_scatter_single(piece, whole)  # gloo may hold on to `piece`
                        self._shard[bucket.in_shard] = piece
        parameter.grad = None


class _Gradients:
    """Knows of every whole gradient that backward made, and whether its memory is still there.

    By weak references to the storages: who sets `grad` to None has freed nothing while a list, a
    closure or a view still refers to it. Its hooks run before those that an answer registers.
    """

    def __init__(self, model: nn.Module, run: _Run | None = None) -> None:
        self._made: list[weakref.ref] = []
        self._run = run
        self.begin()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._on_gradient)

    def begin(self) -> None:
        """From now on: the most bytes alive, and how much had been issued at each gradient."""
        self._before, self.issued = _issued(), []
        self.most = self.most_beside = 0

    def issued_now(self) -> int:
        return _issued() - self._before

    def alive(self) -> int:
        """Bytes of whole gradients that are still in memory."""
        return sum(storage.nbytes() for storage in self._storages())

    def _storages(self) -> Iterator[torch.UntypedStorage]:
        found = {}
        for made in self._made:
            if (storage := made()) is not None:
                found[storage.data_ptr()] = storage
        yield from found.values()

    def _on_gradient(self, parameter: nn.Parameter) -> None:
        self._made.append(weakref.ref(parameter.grad.untyped_storage()))
        self.issued.append(self.issued_now())
        self.most = max(self.most, self.alive())
        if self._run:
            beside = self._run.alive(but_for=self._storages())
            self.most_beside = max(self.most_beside, beside)


def _readable(report: dict) -> dict:
    """With words for NaN, which is equal to nothing, not to itself either."""
    report["values"] = {name: _without_nan(each) for name, each in report["values"].items()}
    return report


def _without_nan(value: object) -> object:
    if isinstance(value, list):
        return [_without_nan(each) for each in value]
    is_nan = isinstance(value, float) and math.isnan(value)
    return "whatever was in memory" if is_nan else value


def _rounded(tensor: torch.Tensor) -> list[float]:
    """As numbers, so that no copy is alive when what is alive is counted."""
    return [round(number, small_model.DIGITS) for number in tensor.tolist()]


def _share(part: int, whole: int) -> str:
    """In words that leave room for different right answers."""
    if part == 0:
        return "none"
    if part >= whole:
        return "all"
    return "at most half" if 2 * part <= whole else "more than half"


def _issued() -> int:
    """How many collectives this rank has issued, but for barriers."""
    return sum(entry.kind != "barrier" for entry in ranks.entries())


def each_part(
    flat: Flat, reduce: Callable[[Bucket, torch.Tensor, torch.Tensor], None], shard: torch.Tensor
) -> None:
    """Fill each bucket with this rank's gradients and `reduce(bucket, whole, piece of shard)`."""
    for bucket in flat.buckets:
        whole = torch.zeros(bucket.size)
        for part in bucket.parts:
            whole[part.place] = part.of(part.parameter.grad)
        reduce(bucket, whole, shard[bucket.in_shard])
