"""What must hold for every job, whatever its numbers."""

from hypothesis import given, settings
from hypothesis import strategies as st

from course_lib import specs
from course_lib.ledger import model_states
from course_lib.specs import MODEL_STATES, ModelSpec, Recipe, Strategy

# No times are tested, and no run differs from the last.
settings.register_profile("ledger", deadline=None, derandomize=True)
settings.load_profile("ledger")

LADDER = ("ddp", "zero1", "zero2", "zero3")
real = st.sampled_from([name for name in specs.models() if not specs.model(name).is_bare])
bare = st.integers(1, 10**13).map(lambda count: ModelSpec("a count", "bare", count=count))
models = st.one_of(bare, real.map(specs.model))
recipes = st.builds(
    Recipe,
    precision=st.sampled_from(list(specs.PRECISIONS)),
    optimizer=st.sampled_from(["adamw", "adamw-bf16", "sgd-momentum"]),
    trainable=st.sampled_from([0.001, 0.1, 0.5, 1.0]),
)
ranks = st.integers(1, 2048)
names = st.sampled_from([*LADDER, "fsdp"])


def without_counters(ledger) -> int:
    return sum(line.bytes for line in ledger.lines if line.what != "step counters")


def elements(line) -> int:
    return int(line.formula.split()[0].replace(",", ""))


@given(models, recipes, names, ranks)
def test_the_ranks_together_hold_every_element(model, recipe, name, n):
    for line in model_states(model, recipe, Strategy(name, n)).lines:
        if line.what == "step counters":
            continue
        trained = recipe.trained(model.parameters)
        whole = model.parameters if line.category == "parameters" else trained
        sharded = line.category in Strategy(name, n).sharded
        assert elements(line) * (n if sharded else 1) >= whole
        assert elements(line) <= whole


@given(models, recipes, names, ranks, ranks)
def test_more_ranks_never_hold_more(model, recipe, name, n, more):
    few = model_states(model, recipe, Strategy(name, n))
    many = model_states(model, recipe, Strategy(name, n + more))
    for category in MODEL_STATES:
        assert many.of(category) <= few.of(category)


@given(bare, recipes, ranks)
def test_each_stage_holds_at_most_what_the_one_before_holds(model, recipe, n):
    totals = [model_states(model, recipe, Strategy(name, n)).total for name in LADDER]
    assert totals == sorted(totals, reverse=True)


@given(real, st.sampled_from(list(specs.PRECISIONS)), st.integers(1, 64))
def test_so_it_is_for_models_with_tensors(name, precision, n):
    """Up to 64 ranks: cutting a norm into shards of an element or none costs more than it saves."""
    model, recipe = specs.model(name), Recipe(precision)
    totals = [without_counters(model_states(model, recipe, Strategy(s, n))) for s in LADDER]
    assert totals == sorted(totals, reverse=True)


@given(models, recipes)
def test_one_rank_holds_the_same_under_every_strategy(model, recipe):
    strategies = [*(Strategy(name) for name in specs.SHARDED if name != "hsdp")]
    strategies.append(Strategy("hsdp", gpus_per_node=1))
    held = {without_counters(model_states(model, recipe, strategy)) for strategy in strategies}
    assert len(held) == 1


@given(models, recipes, st.integers(1, 64), st.integers(1, 16))
def test_hsdp_holds_what_fsdp_holds_on_one_node(model, recipe, nodes, per_node):
    hsdp = model_states(model, recipe, Strategy("hsdp", nodes * per_node, per_node))
    fsdp = model_states(model, recipe, Strategy("fsdp", per_node))
    assert hsdp.by_category() == fsdp.by_category()


@given(models, recipes, st.sampled_from(["zero3", "fsdp"]), ranks)
def test_offloading_moves_bytes_and_loses_none(model, recipe, name, n):
    here = model_states(model, recipe, Strategy(name, n))
    some = model_states(model, recipe, Strategy(name, n, offload="optimizer"))
    none = model_states(model, recipe, Strategy(name, n, offload="all"))
    assert (none.total, none.host) == (0, here.total)
    assert some.host == here.optimizer_states
    assert some.total + some.host == here.total
    assert (some.parameters, some.gradients) == (here.parameters, here.gradients)
