"""The ladder explorer without a browser: its numbers, its words, what its controls change."""

import sys

import pytest

from course_lib import comm, explorers, specs
from course_lib.errors import CourseError
from course_lib.figures.image import new_figure
from course_lib.ledger import model_states
from course_lib.specs import Recipe, Strategy

ladder = sys.modules["course_lib.explorers.ladder"]  # explorers.ladder is the function
JOB = dict(
    model="llama3-8b",
    ranks=64,
    link="ib-ndr",
    accumulation=1,
    precision="zero-bf16",
    gpu="h100-sxm-80",
    rung="ddp",
)
PAPER = JOB | {"model": 7_500_000_000}


def test_the_papers_row():
    """Of 16 bytes for each of 7.5 billion parameters, and of 63/64 of 2P, 2P, 2P and 3P."""
    rungs = ladder.compute(**PAPER).rungs
    assert [rung.held for rung in rungs] == [
        120_000_000_000,
        31_406_250_000,
        16_640_625_000,
        1_875_000_000,
    ]
    once = 2 * 7_500_000_000 * 63 // 64
    assert [rung.moved for rung in rungs] == [2 * once, 2 * once, 2 * once, 3 * once]


@pytest.mark.parametrize("model", ["llama3-8b", "gpt2", 10**8])
@pytest.mark.parametrize("precision", ["zero-bf16", "fsdp-bf16", "megatron-bf16"])
def test_the_numbers_are_the_librarys(model, precision):
    job = JOB | {"model": model, "precision": precision, "accumulation": 4, "ranks": 24}
    result = ladder.compute(**job)
    preset = isinstance(model, str)
    spec = specs.model(model) if preset else specs.ModelSpec("bare", "bare", count=model)
    recipe = Recipe(precision, grad_accum=4)
    network = comm.Topology.of(specs.Cluster(24))
    assert [rung.name for rung in result.rungs] == ["ddp", "zero1", "zero2", "zero3"]
    for rung, collectives in zip(result.rungs, result.collectives, strict=True):
        strategy = Strategy(rung.name, 24)
        assert rung.by_category() == model_states(spec, recipe, strategy).by_category()
        plan = comm.step(spec, recipe, strategy)
        assert rung.moved == pytest.approx(plan.bytes_per_rank, rel=1e-6)  # padding of buckets
        assert rung.peak is None and rung.seconds > 0
        if rung.name == "zero3":
            assert (rung.seconds, collectives) == (comm.step_seconds(plan, network), plan.count)


def test_a_bucket_is_no_smaller_than_a_unit_so_that_latency_does_not_decide():
    """Else many small buckets would cost zero2 more time than zero3's larger units."""
    for ranks in (8, 64, 1024):
        result = ladder.compute(**JOB | {"ranks": ranks})
        seconds = [rung.seconds for rung in result.rungs]
        assert seconds[0] == pytest.approx(seconds[2], rel=0.15)
        assert 1.3 < seconds[3] / seconds[2] < 3.5
        assert max(result.collectives[:3]) <= result.collectives[3]


def test_within_a_node_the_link_between_nodes_does_not_matter():
    fast, slow = (
        ladder.compute(**JOB | {"ranks": 8, "link": link}) for link in ("ib-ndr", "ethernet-10g")
    )
    assert fast.rungs == slow.rungs and fast.network == slow.network == "nvlink4"
    assert ladder.compute(**JOB | {"link": "ethernet-10g"}).rungs[0].seconds > 1


def sentence(**job):
    alt, table = ladder.words(ladder.compute(**JOB | job))
    told = table.split("</strong>")[0].removeprefix("<p><strong>")
    assert told in alt
    return told


def test_the_sentence_names_what_the_next_rung_buys_and_costs():
    assert sentence(rung="ddp") == (
        "Next, zero1 shards the optimizer states: it buys 88.34 GiB on each rank, and costs "
        "nothing, as it moves as many bytes."
    )
    zero3 = sentence(rung="zero2")
    assert "zero3 shards the parameters: it buys 14.72 GiB on each rank, and costs 14.72" in zero3
    assert zero3.endswith("more in each step, as every micro-batch gathers the parameters, twice.")
    assert "zero3 is the last rung, with 1.87 GiB on each rank" in sentence(rung="zero3")


def test_accumulation_is_what_zero2_costs():
    """Three more reduce_scatters of 2 bytes for each parameter."""
    assert sentence(rung="zero1").endswith("costs nothing, as it moves as many bytes.")
    told = sentence(rung="zero1", accumulation=4)
    assert "costs 44.17 GiB" in told and "as every micro-batch is reduce-scattered." in told


def test_fewer_bytes_are_no_cost():
    """Gradients of 4 bytes, parameters of 2: an all_gather of the latter is half as much."""
    told = sentence(rung="ddp", precision="megatron-bf16")
    assert "costs nothing: it even moves 14.72 GiB less." in told


def test_one_rank_has_nobody_to_share_with():
    told = sentence(ranks=1, rung="zero2")
    assert "it buys nothing, as there is nobody to share with" in told and "costs nothing" in told


def test_the_table_has_a_row_for_each_rung_and_says_which_fit():
    result = ladder.compute(**JOB | {"rung": "zero1"})
    assert [result.fits(rung) for rung in result.rungs] == [False, True, True, True]
    alt, table = ladder.words(result)
    assert "zero3 1.87 GiB" in alt and "Capacity of h100-sxm-80: 80 GiB" in alt
    assert "<strong>zero1</strong> (chosen)" in table and "over ib-ndr" in table
    assert table.count("<tr>") == 5
    assert (table.count("<td>no</td>"), table.count("<td>yes</td>")) == (1, 3)


def test_the_picture_shows_the_chosen_rung_and_the_gpu():
    figure = new_figure()
    update = ladder.draw(figure.add_subplot())
    for rung in ("ddp", "zero2"):  # an update moves what is there
        result = ladder.compute(**JOB | {"rung": rung})
        update(result)
        texts = [text for axes in figure.axes for text in axes.texts]
        bold = [text.get_text() for text in texts if text.get_fontweight() == "bold"]
        assert len(bold) == 3 and bold[0] == {"ddp": "120 GiB", "zero2": "16.6 GiB"}[rung]
        assert any("h100-sxm-80, 80 GiB" in text.get_text() for text in texts)


def test_a_job_that_cannot_be_is_a_sentence():
    with pytest.raises(CourseError, match="parameter count"):
        ladder.compute(**JOB | {"model": 0})
    with pytest.raises(CourseError, match="no model preset called 'lama3-8b'"):
        ladder.compute(**JOB | {"model": "lama3-8b"})


@pytest.mark.parametrize(
    ("control", "value"),
    [
        ("model", 10**10),
        ("model", "llama3-70b"),
        ("ranks", 8),
        ("link", "ethernet-100g"),
        ("accumulation", 8),
        ("precision", "fp32"),
        ("gpu", "a100-sxm-40"),
        ("rung", "zero2"),
    ],
)
def test_moving_a_control_changes_picture_and_table(control, value):
    made = explorers.ladder()
    picture, table = made.html.split("</figure>")
    made.controls[control].value = value
    assert made.html.split("</figure>")[0] != picture
    assert made.html.split("</figure>")[1] != table


def test_the_models_slider_goes_by_size_and_knows_any_count():
    odd = explorers.ladder(model=123_456_789).controls["model"]
    assert odd.value == 123_456_789 and odd.label == "0.123 billion"
    sizes = [
        specs.model(value).parameters if isinstance(value, str) else value
        for _, value in odd.options
    ]
    assert sizes == sorted(sizes) and max(b / a for a, b in zip(sizes, sizes[1:], strict=False)) < 3
    assert explorers.ladder(model="gpt2").controls["model"].label == "gpt2, 0.124 billion"


def test_the_stored_output_reads_without_a_kernel():
    bundle = explorers.ladder(ranks=16, rung="zero2")._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    html = bundle["text/html"]
    assert "ranks 16" in html and "rung zero2" in html and "<table>" in html
    assert 'alt="Three panels of bars' in html


def test_the_static_caption_names_the_first_option_too():
    page = explorers.ladder(accumulation=1, ranks=1)._repr_mimebundle_()["text/html"]
    assert "ranks 1 · accumulation 1 · rung ddp" in page
