"""Buffers: what comes and goes within a step. They are no model states.

Gathered are parameters that are whole, or on their way. Reduced are gradients on theirs, among
them whole ones that only pass through. Of both a ledger has the most that there is at once:

fsdp   While backward goes from unit to unit, which is when activations are there, too. The root
       unit is whole, and so is one more, which for a moment is there twice, as it is copied out of
       what was gathered; the next `prefetch` units are on their way. A unit's gradients are whole
       until its backward ends, while those of the one before are reduced; of the root's, those of
       the head are there all the while. The life cycle of units
       (see life_cycle) is played through for it. Before and after, when hardly any activations are
       there, the root alone may take more: twice its size as forward begins, and three times at the
       end, when its gradients are copied.
zero3  As ZeRO-3 of this course: one unit is whole, the next are on their way; a gradient is copied
       to where it is reduced as soon as it is complete, and UNDER_WAY units are reduced at a time.
zero2  A bucket of gradients is filled while UNDER_WAY others are reduced.
zero1  The mean gradients of a rank's shard, and one bucket that is reduced.
ddp    None, as gradients are views of buckets. (PyTorch's DDP has both, unless
       gradient_as_bucket_view is True.)

What a backend copies out of sight does not count, nor do the optimizer's temporaries. The two are
not most at the same moment, and when a step holds most depends on activations, too: so model states
and these do not add up to a peak.
"""

from collections.abc import Collection, Iterable

from course_lib.comm.buckets import BUCKET_BYTES, UNDER_WAY, flat_piece, in_use_order
from course_lib.comm.step import gathered_as, reduced_as, trained_shards
from course_lib.comm.units import ROOT, Unit, units
from course_lib.ledger.ledger import Ledger, Line
from course_lib.ledger.life_cycle import GATHER, GRADIENTS, REDUCE, Life, LifeCycle
from course_lib.specs import DTYPE_BYTES, PRECISIONS, ModelSpec, Recipe, Strategy
from course_lib.specs.checking import whole
from course_lib.specs.padding import flat_shard

GATHER_BUFFERS, REDUCE_BUFFERS = "gather_buffers", "reduce_buffers"
BUFFERS = (GATHER_BUFFERS, REDUCE_BUFFERS)


def buffers(
    model: ModelSpec,
    recipe: Recipe,
    strategy: Strategy,
    *,
    prefetch: int = 1,
    gathers: int | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    by_hand: Collection[str] | None = None,
) -> Ledger:
    """The ledger of a rank's buffers: the most that is gathered at once, and reduced at once.

    `prefetch` is how many units are sent for ahead of use, in forward and in backward; of fsdp at
    most `gathers` are on their way at once, which by default none are kept from. `bucket_bytes` is
    that of the buckets of zero1 and zero2; `by_hand` are fsdp's units by name, see comm.units.
    """
    whole("prefetch", prefetch, least=0)
    if strategy.name in ("fsdp", "hsdp"):
        lines = _of_units(model, recipe, strategy, prefetch, gathers, by_hand)
    elif strategy.name == "zero3":
        lines = _of_zero3(model, recipe, strategy, prefetch)
    else:
        lines = _of_buckets(model, recipe, strategy, bucket_bytes)
    return Ledger(model, recipe, strategy, tuple(x for x in lines if x.bytes), BUFFERS)


def lives(
    cut: Iterable[Unit],
    trained: Iterable[int],
    recipe: Recipe,
    strategy: Strategy,
    reduce: str | None = None,
) -> list[Life]:
    """fsdp's units for a LifeCycle, the root first, of units `cut`.

    `trained` are the elements of their shards that are trained, `reduce` the dtype in which
    gradients are reduced, where it is not that of the recipe.
    """
    ranks, offloads = strategy.shard_ranks, strategy.offload == "all"
    own, gathered, reduced = itemsizes(recipe, reduce)
    found = [
        Life(
            unit.name,
            unit.root,
            reshards=bool(strategy.reshard_after_forward) and not unit.root,
            whole=ranks * unit.shard * gathered,
            sent=unit.shard * gathered if offloads or gathered != own else 0,
            near=_near(unit, strategy) * gathered,
            to_reduce=ranks * elements * reduced,
            piece=elements * reduced,
            shard=elements * own,
        )
        for unit, elements in zip(cut, trained, strict=True)
    ]
    root = [life for life in found if life.root] or [Life(ROOT, True, False)]
    return root + [life for life in found if not life.root]


def itemsizes(recipe: Recipe, reduce: str | None = None) -> tuple[int, int, int]:
    """Bytes of an element of shards, of what is gathered and computed with, and reduced."""
    own = PRECISIONS[recipe.precision].parameters
    return tuple(DTYPE_BYTES[x] for x in (own, gathered_as(recipe), reduce or reduced_as(recipe)))


def _near(unit: Unit, strategy: Strategy) -> int:
    """Elements that a rank keeps after forward, beyond its shard."""
    if unit.root or isinstance(strategy.reshard_after_forward, bool):
        return 0
    return strategy.shard_ranks * unit.shard // strategy.near_ranks


class _Sweep(LifeCycle):
    """A micro-batch without activations: forward from unit to unit, and backward."""

    def __init__(self, units: list[Life], prefetch: int, gathers: int | None) -> None:
        super().__init__(
            units,
            self.see,
            forward_prefetch=prefetch,
            backward_prefetch=prefetch,
            gathers=gathers or max(prefetch, 1),
        )
        # Bytes of whole gradients: that come before those of units inside, and after.
        self.gradients: dict[Life, tuple[int, int]] = {}
        self.where = ""  # it counts, '' where it does not
        self.gathered, self.reduced = (0, ""), (0, 0, "")  # the most, and where
        self.inside: dict[Life, list[Life]] = {unit: [] for unit in self.units}
        for unit in self.units[1:]:
            around = [x for x in self.units if unit.name.startswith(f"{x.name}.")]
            innermost = max(around, key=lambda x: len(x.name), default=self.units[0])
            self.inside[innermost].append(unit)

    def see(self, what: str = "") -> None:
        gather, gradients, reduce = (self.held[kind] for kind in (GATHER, GRADIENTS, REDUCE))
        if self.where and gather > self.gathered[0]:
            self.gathered = gather, self.where
        if self.where and gradients + reduce > sum(self.reduced[:2]):
            self.reduced = gradients, reduce, self.where

    def micro_batch(self, trained: bool) -> None:
        root, *inner = self.units
        phase = "backward" if trained else "forward"
        self.counts = {
            unit: f"{phase} of {unit.name or 'the root unit'}" for unit in inner or [root]
        }
        self.forward(root, counts=not trained)
        if trained:
            self.backward(root)
        self.where = self.counts.get(root, "")
        self.end_backward()
        self.where = ""

    def forward(self, unit: Life, counts: bool) -> None:
        self.where = self.counts.get(unit, "") if counts else ""
        self.before_forward(unit)
        self.see()
        for other in self.inside[unit]:
            self.forward(other, counts)
        self.after_forward(unit)

    def backward(self, unit: Life) -> None:
        self.where = self.counts.get(unit, "")
        before, after = self.gradients[unit]
        self.before_backward(unit)
        self.gradient(unit, "before", before)
        self.see()
        for other in reversed(self.inside[unit]):
            self.backward(other)
        self.where = self.counts.get(unit, "")
        self.gradient(unit, "after", after)
        self.see()
        if not unit.root:  # which ends with backward
            self.after_backward(unit)


def _of_units(model, recipe, strategy, prefetch, gathers, by_hand) -> list[Line]:
    cut = units(model, strategy, by_hand)
    trained = trained_shards([unit.shard for unit in cut], model.parameters, recipe)
    found = lives(cut, trained or [0] * len(cut), recipe, strategy)
    sweep = _Sweep(found, prefetch, gathers)
    _, width, _ = itemsizes(recipe)
    place = {tensor: i for i, tensor in enumerate(in_use_order(model))}
    tensors = {unit.name: unit.tensors for unit in cut}
    for life, inside in sweep.inside.items():
        own = tensors.get(life.name, ())  # an empty root has none
        last = max((place[tensors[x.name][0]] for x in inside), default=-1)
        late = sum(recipe.trained(x.numel) for x in own if place[x] > last)
        early = sum(recipe.trained(x.numel) for x in own if place[x] <= last)
        sweep.gradients[life] = late * width, early * width
    for _ in range(2):  # the first has no order to prefetch by
        sweep.micro_batch(bool(trained))
    return _lines(recipe, *sweep.gathered, *sweep.reduced)


def _of_zero3(model, recipe, strategy, prefetch) -> list[Line]:
    ranks, cut = strategy.shard_ranks, units(model, strategy)
    trained = trained_shards([unit.shard for unit in cut], model.parameters, recipe)
    wholes = [ranks * unit.shard for unit in cut]
    reduced = [ranks * elements for elements in trained]
    always = 0
    if model.tied_embeddings:  # whole from the embedding to the head, and back
        always, wholes[0] = wholes[0], 0
    gather = [2 * always]
    for order in (wholes, wholes[::-1]):
        for i, size in enumerate(order):
            coming = order[i + 1 : i + 1 + prefetch]
            sent_for = coming[:-1] if i else []  # before it is copied out
            gather.append(always + size + max(size + sum(sent_for), sum(coming)))
    reduce = [(0, 0)]
    for i, size in enumerate(reduced):
        before = sum(x + x // ranks for x in reduced[i + 1 : i + 1 + UNDER_WAY])
        reduce.append((max(x.numel for x in cut[i].tensors), size + before))
    _, width, reduced_width = itemsizes(recipe)
    gradients, buffers = max(((g * width, r * reduced_width) for g, r in reduce), key=sum)
    where = "forward and backward"
    return _lines(recipe, max(gather) * width, where, gradients, buffers, "backward")


def _of_buckets(model, recipe, strategy, bucket_bytes) -> list[Line]:
    if strategy.name == "ddp" or not recipe.trained(model.parameters):
        return []
    precision, ranks = PRECISIONS[recipe.precision], strategy.gpus
    itemsize = DTYPE_BYTES[precision.gradients]
    shard = flat_shard(recipe.trained(model.parameters), ranks)
    piece = min(flat_piece(bucket_bytes, DTYPE_BYTES[precision.parameters], ranks), shard)
    if strategy.name == "zero1":
        elements, at = shard + ranks * piece, "the shard's mean gradients and a bucket"
    else:
        under_way = min(UNDER_WAY, -(-shard // piece) - 1)
        elements = ranks * piece * (under_way + 1) + piece * under_way
        at = f"a bucket that is filled and {under_way} that are reduced"
    return [_line(REDUCE_BUFFERS, precision.gradients, "reduced", elements * itemsize, at)]


def _lines(recipe: Recipe, gather: int, at: str, gradients: int, reduce: int, then: str):
    return [
        _line(GATHER_BUFFERS, gathered_as(recipe), "whole or on its way", gather, f"in {at}"),
        _line(REDUCE_BUFFERS, gathered_as(recipe), "whole gradients", gradients, f"in {then}"),
        _line(REDUCE_BUFFERS, reduced_as(recipe), "reduced", reduce, f"in {then}"),
    ]


def _line(category: str, dtype: str, what: str, nbytes: int, share: str) -> Line:
    itemsize = DTYPE_BYTES[dtype]
    formula = f"{nbytes // itemsize:,} × {itemsize} B"
    return Line(category, f"{dtype} {what}", nbytes, formula, f"at most at once, {share}")
