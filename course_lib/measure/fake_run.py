"""The live bytes of a job that is too large for this machine: one rank of many, on fake tensors.

    fake_peak(model("llama2-7b"), Recipe("fsdp-bf16"), Strategy("fsdp", gpus=64)).by_category

A *fake tensor* has a shape, a dtype and a storage of so many bytes, of which none is allocated. The
operators give fake tensors. So the program is the real one, the course's Llama, its FSDP, PyTorch's
AdamW, autograd and checkpoints; its storages come and go as in a real step, and `LiveBytes` follows
them. As rank 0 of N it belongs to a "fake" process group (see `one_of_many`). Two steps are run:
the first, in which the optimizer makes its states, and one as all after it.

The garbage collector is off meanwhile: what a cycle of references holds lives on, and shows.

A step on fake tensors takes its time by operators, so one of 80 layers takes minutes. `layers`
saves them: two runs of few layers tell the peak of many, as all layers do the same. A step falls
into *stretches*: one begins where forward comes to a block or leaves it, and so does backward. The
stretches of both runs are aligned, those of the first half of a phase from its start, the others
from its end, and so are the moments of each stretch. Between the halves a larger model has more of
the same. Of each moment the bytes grow by as much with each layer, so the peak is the most that any
comes to with all layers: which moment that is may well change with their number.
"""

import contextlib
import dataclasses
import gc
import warnings
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import pairwise

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from course_lib.comm.step import gathered_as, reduced_as
from course_lib.errors import CourseError
from course_lib.measure.live import state_tensors
from course_lib.measure.one_of_many import one_of_many
from course_lib.measure.tracker import LiveBytes, Moment
from course_lib.models import Llama
from course_lib.sharded import wrapping
from course_lib.sharded.fsdp import FSDP, MixedPrecision
from course_lib.specs import PRECISIONS, ModelSpec, Recipe, Strategy
from course_lib.specs.checking import known, whole
from course_lib.specs.strategy import BY_UNITS

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
OPTIMIZERS = {
    "adamw": partial(torch.optim.AdamW, foreach=False),
    "sgd": partial(torch.optim.SGD, lr=0.1, foreach=False),
    "sgd-momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, foreach=False),
}
HELD = ("fp32", "fsdp-bf16", "pure-bf16")  # precisions without a master copy, or autocast


Stretch = tuple[Moment, ...]
Phases = tuple[tuple[Stretch, ...], ...]  # forward and backward of each micro-batch, the update


@dataclasses.dataclass(frozen=True)
class FakeRun:
    """What a rank held in its first step, and in one as all after it: see `fake_peak`."""

    first_step: Phases = dataclasses.field(repr=False)
    step: Phases = dataclasses.field(repr=False)

    @property
    def peak(self) -> Moment:
        """The first moment with the most bytes, of a step after the first."""
        return most(self.step)

    @property
    def bytes(self) -> int:
        return self.peak.total

    @property
    def by_category(self) -> dict[str, int]:
        return self.peak.live

    @property
    def where(self) -> str:
        """The phase or the label, and the operator, after which the peak was there."""
        return f"{self.peak.where}, {self.peak.operator}"

    @property
    def steady(self) -> dict[str, int]:
        """Bytes of each category between two steps."""
        return self.step[0][0][0].live


def most(phases: Phases) -> Moment:
    """The first moment with the most bytes."""
    moments = [x for phase in phases for stretch in phase for x in stretch]
    return max(moments, key=lambda moment: moment.total)


def fake_peak(
    spec: ModelSpec,
    recipe: Recipe,
    strategy: Strategy,
    *,
    layers: tuple[int, int] | None = None,
    real: bool = False,
    optimizer=None,
    **options,
) -> FakeRun:
    """Two steps as rank 0 of `strategy.gpus`, which shards by fsdp or hsdp; see the module.

    `options` are FSDP's, such as `forward_prefetch`. `layers` are two numbers of layers to run in
    place of the model's, best 6 and 8. With `real` tensors, which must fit, all else is the same.
    `optimizer(parameters)` is in place of the recipe's, whose updates go tensor by tensor.

    Errors: CourseError for jobs that this course's FSDP and Llama do not run.
    """
    _check(spec, recipe, strategy, layers)
    run = partial(_run, recipe=recipe, strategy=strategy, real=real, made=optimizer, **options)
    if layers is None or layers[1] >= spec.num_layers:
        return run(spec)
    few, more = (run(dataclasses.replace(spec, num_layers=count)) for count in layers)
    steps = (spec.num_layers - layers[0]) / (layers[1] - layers[0])
    return FakeRun(
        _extended(few.first_step, more.first_step, steps), _extended(few.step, more.step, steps)
    )


def _run(spec, recipe, strategy, real, made, **options) -> FakeRun:
    with one_of_many(strategy.gpus), _undisturbed():
        mesh = _mesh(strategy)  # its ranks are numbers, which fake tensors do not have
        with contextlib.nullcontext() if real else FakeTensorMode():
            model = _model(spec, recipe)
            fsdp = FSDP(
                model, _units(model, strategy), mesh=mesh, **_ways(recipe, strategy, options)
            )
            optimizer = (made or OPTIMIZERS[recipe.optimizer])(model.parameters())
            tokens = torch.zeros(recipe.micro_batch, recipe.seq_len + 1, dtype=torch.long)
            return FakeRun(*(_step(fsdp, optimizer, tokens, recipe) for _ in range(2)))


def _step(fsdp: FSDP, optimizer, tokens: torch.Tensor, recipe: Recipe) -> Phases:
    phases: list[list[int]] = [[0]]  # in each the moments at which a stretch begins

    def mark(*_) -> None:
        phases[-1].append(len(live.timeline))

    def mark_both(tensor: torch.Tensor) -> None:
        mark()  # and where backward comes to it
        tensor.register_hook(mark)

    hooks = []
    for block in fsdp.model.model.layers:
        hooks.append(block.register_forward_pre_hook(lambda _, args: mark_both(args[0])))
        hooks.append(block.register_forward_hook(lambda _, args, output: mark_both(output)))
    with _Follower(fsdp.model, optimizer) as live:
        for _ in range(recipe.grad_accum):
            loss = fsdp.model.loss(tokens)
            phases.append([len(live.timeline)])
            loss.backward()
            phases.append([len(live.timeline)])
        optimizer.step()
        optimizer.zero_grad()
    for hook in hooks:
        hook.remove()
    return tuple(_stretches(phases, live.timeline))


def _stretches(phases: list[list[int]], timeline: list[Moment]) -> Iterator[tuple[Stretch, ...]]:
    ends = [*(phase[0] for phase in phases[1:]), len(timeline)]
    for phase, end in zip(phases, ends, strict=True):
        yield tuple(tuple(timeline[a:b]) for a, b in pairwise([*phase, end]))


class _Follower(LiveBytes):
    """LiveBytes for models of many layers: looks only where something may be new.

    That is a parameter's place, where a module shows another, or its gradient; and the optimizer's
    states while it updates.
    """

    def __init__(self, model: nn.Module, optimizer) -> None:
        super().__init__(model, optimizer)
        self._modules = [module for module in self._modules if module._parameters]
        self._seen: dict[tuple[str, int], weakref.ref] = {}
        self._has_states = False

    def _find(self) -> None:
        each = [p for m in self._modules for p in m._parameters.values() if p is not None]
        self._put(self._new(each, "parameters"), "parameters")
        self._put(self._new((p.grad for p in each), "gradients"), "gradients")
        updates = not self._has_states or any("Optimizer.step" in x for x in self._labels)
        if updates and not self._in_backward():
            self._has_states = True
            states = state_tensors(self._optimizer)
            self._put(self._new(states, "optimizer_states"), "optimizer_states")

    def _new(self, tensors, category: str) -> Iterator[torch.Tensor]:
        for tensor in tensors:
            if tensor is None:
                continue
            key = category, id(tensor)
            seen = self._seen.get(key)
            if seen is None or seen() is not tensor:
                self._seen[key] = weakref.ref(tensor)
                yield tensor


def _extended(few: Phases, more: Phases, steps: float) -> Phases:
    """The moments of a model that has `steps` times as many layers more as `more` has."""
    phases = []
    for one, other in zip(few, more, strict=True):
        stretches = [_aligned(a, b) for a, b in _aligned(one, other)]
        phases.append(tuple(tuple(_beyond(x, y, steps) for x, y in pairs) for pairs in stretches))
    return tuple(phases)


def _aligned(few: tuple, more: tuple) -> Iterator[tuple]:
    """Each of `few` with one of `more`, in the first half from the start, else from the end."""
    half = len(few) // 2
    yield from zip(few[:half], more[:half], strict=True)
    yield from zip(few[half:], more[len(more) - len(few) + half :], strict=True)


def _beyond(few: Moment, more: Moment, steps: float) -> Moment:
    a, b = Counter(few.live), Counter(more.live)
    live = {name: round(a[name] + steps * (b[name] - a[name])) for name in few.live | more.live}
    return Moment(
        {name: nbytes for name, nbytes in live.items() if nbytes}, more.where, more.operator
    )


def _check(spec: ModelSpec, recipe: Recipe, strategy: Strategy, layers) -> None:
    known("strategy that fake_peak runs, called", strategy.name, BY_UNITS)
    known("precision that fake_peak runs, called", recipe.precision, HELD)
    known("optimizer that fake_peak runs, called", recipe.optimizer, OPTIMIZERS)
    known("checkpointing that fake_peak runs, called", recipe.checkpointing, ("none", "full"))
    near = strategy.reshard_after_forward
    if not isinstance(near, bool):
        raise CourseError(
            f"reshard_after_forward is {near}, and FSDP cannot make subgroups under fake tensors: "
            "give True or False."
        )
    if spec.family != "llama" or recipe.trainable != 1 or strategy.offload != "none":
        raise CourseError(
            f"fake_peak was given a {spec.family} model, of which {recipe.trainable:.0%} is "
            f"trained, with offload {strategy.offload!r}: it runs llama models, trained whole, on "
            "one device."
        )
    for number in layers or ():
        whole("a number of layers", number)
    if layers and layers[0] >= layers[1]:
        raise CourseError(f"layers is {layers}: give two numbers, the smaller one first.")


def _mesh(strategy: Strategy) -> DeviceMesh:
    both = (strategy.replicas, strategy.shard_ranks)
    return init_device_mesh("cpu", both if strategy.name == "hsdp" else both[1:])


def _model(spec: ModelSpec, recipe: Recipe) -> Llama:
    """In the dtype of shards. No `.to`, which swaps fake parameters and cannot."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[PRECISIONS[recipe.precision].parameters])
    try:
        model = Llama(spec)
    finally:
        torch.set_default_dtype(before)
    blocks = model.model.layers
    if recipe.checkpointing == "full":  # fake tensors have no state of the random generator
        for i, block in enumerate(blocks):
            blocks[i] = checkpoint_wrapper(block, preserve_rng_state=False)
    return model


def _units(model: Llama, strategy: Strategy) -> list[nn.Module]:
    if strategy.wrap in ("layer", "model"):
        return list(model.model.layers) if strategy.wrap == "layer" else []
    return wrapping.by_size(model, int(strategy.wrap.removesuffix("-params")))


def _ways(recipe: Recipe, strategy: Strategy, options: dict) -> dict:
    precision = MixedPrecision(DTYPES[gathered_as(recipe)], DTYPES[reduced_as(recipe)])
    reshards = strategy.reshard_after_forward
    return {"precision": precision, "reshard_after_forward": reshards} | options


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Nothing is freed by chance, and nothing warns: FSDP compares data pointers, and those of fake
    tensors are all alike."""
    collects = gc.isenabled()
    gc.disable()
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Accessing the data pointer of FakeTensor")
            yield
    finally:
        if collects:
            gc.enable()
