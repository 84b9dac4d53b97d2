"""`course ledger --explain`: where the bytes of a step come from, and the source of each rule."""

from collections.abc import Iterator

from course_lib.ledger import LABELS, Execution, Peak, gib
from course_lib.ledger.saved import saved
from course_lib.specs import DTYPE_BYTES, PRECISIONS, ModelSpec, Recipe, Strategy

CHECKPOINTED = {
    "none": "all of it waits for backward",
    "selective": "the outputs of attention and of every second linear layer; the rest runs again",
    "full": "its input alone; the rest runs again",
}


def explained(
    model: ModelSpec, recipe: Recipe, strategy: Strategy, execution: Execution, most: Peak
) -> Iterator[str]:
    """Lines of text."""
    precision = PRECISIONS[recipe.precision]
    yield f"Model states. {precision.name}: {precision.note} Source: {precision.source}."
    yield ""
    rows = recipe.micro_batch * recipe.seq_len
    found = saved(model, recipe, execution)
    total = sum(each.bytes for each in found)
    yield (
        f"Activations. A block keeps {total:,} bytes for backward, {total // rows:,} for each of "
        f"{rows:,} tokens; {model.num_layers} blocks, {gib(model.num_layers * total)}."
    )
    yield f"Checkpointing {recipe.checkpointing}: {CHECKPOINTED[recipe.checkpointing]}."
    for each in found:
        where = f"{each.module or 'block'}: {each.operator.replace('_', ' ')}"
        yield f"  {where:45}{each.bytes:>16,} B = {each.bytes / rows:,.0f} B × {rows:,} tokens"
    yield "Source: PyTorch's formulas of derivatives (derivatives.yaml); see ledger/operators.py."
    yield ""
    logits = rows * model.vocab_size
    yield (
        f"Logits. {rows:,} tokens × {model.vocab_size:,} = {logits:,}; in fp32, 4 B each, "
        f"{gib(DTYPE_BYTES['fp32'] * logits)}: log_softmax, which is saved, its gradient, and that "
        "of the logits."
    )
    yield ""
    yield f"The peak, {most.when}:"
    for name, nbytes in most.by_category.items():
        yield f"  {LABELS[name]:45}{nbytes:>16,} B = {gib(nbytes)}"
    yield f"  {'together':45}{most.bytes:>16,} B = {gib(most.bytes)}"
    yield (
        "Reserved: at least that; at most the most of each kind by itself, added up, as where no "
        f"memory is taken by another kind: {most.apart:,} B = {gib(most.apart)}."
    )
