"""The bucket explorer without a browser: its numbers, its words, what its controls change."""

import re

import pytest

from course_lib import explorers, specs
from course_lib.comm import Topology
from course_lib.explorers import buckets
from course_lib.figures.image import new_figure

JOB = dict(model="gpt2-xl", ranks=64, link="ib-ndr", tokens=8192)
MIB = 2**20


def test_the_numbers_are_the_librarys():
    """One bucket: backward's FLOPs at the GPU's rate, then one all-reduce of all gradients."""
    spec = specs.model("gpt2-xl")
    result = buckets.compute(**JOB, bucket=16384 * MIB)
    whole = specs.Collective("all_reduce", spec.parameters, 4, 64)
    network = Topology.of(specs.Cluster(gpus=64, link="ib-ndr"))
    sent = min(network.seconds(whole, name) for name in ("ring", "tree", "hierarchical"))
    blocks = sum(x.numel for x in spec.tensors() if len(x.shape) == 2 and x.layer is not None)
    matrices = blocks + 50257 * 1600  # and the head
    assert result.lanes.exposed == result.lanes.busy == pytest.approx(sent)
    assert result.lanes.compute_end == pytest.approx(4 * matrices * 8192 / 794.5e12)


def test_an_embedding_that_is_looked_up_costs_no_time():
    llama = specs.model("llama2-7b")
    result = buckets.compute("llama2-7b", 8, "ib-ndr", 1024, 16384 * MIB)
    multiplied = sum(x.numel for x in llama.tensors() if len(x.shape) == 2) - 32000 * 4096
    assert result.lanes.compute_end == pytest.approx(4 * multiplied * 1024 / 794.5e12)


def test_a_tied_head_is_multiplied_first_and_its_gradient_is_complete_last():
    result = buckets.compute(**JOB, bucket=MIB)
    gradients = result.lanes.compute
    assert gradients[0].nbytes == 0 and gradients[0].seconds > 0
    assert gradients[-1].nbytes == 4 * 50257 * 1600 and gradients[-1].seconds == 0


def test_blocks_cover_backward_without_gaps():
    result = buckets.compute(**JOB, bucket=25 * MIB)
    assert len(result.blocks) == 48 + 2  # and what stands before and behind the blocks
    assert result.blocks[0].start == 0 and result.blocks[-1].end == result.lanes.compute_end
    assert all(a.end == b.start for a, b in zip(result.blocks, result.blocks[1:], strict=False))
    assert sum(block.nbytes for block in result.blocks) == 4 * specs.model("gpt2-xl").parameters


def test_small_buckets_pay_latency_and_one_bucket_hides_nothing():
    result = buckets.compute("gpt2", 64, "ib-ndr", 8192, bucket=25 * MIB)
    exposed = [lanes.exposed for lanes in result.by_cap.values()]
    best = exposed.index(min(exposed))
    assert 0 < best < len(exposed) - 1
    assert exposed[0] > 2 * exposed[best] and exposed[-1] > 2 * exposed[best]


def test_within_a_node_the_link_between_nodes_does_not_matter():
    fast, slow = (
        buckets.compute("gpt2", 8, link, 8192, 25 * MIB) for link in ("ib-ndr", "ethernet-10g")
    )
    assert fast.lanes == slow.lanes and fast.network == slow.network == "nvlink4"


def test_the_words_say_what_the_picture_shows():
    result = buckets.compute(**JOB, bucket=256 * MIB)
    alt, table = buckets.words(result)
    count = len(result.lanes.communication)
    assert "lowest at 16 MiB" in alt and f"{count} all-reduces over ib-ndr" in alt
    assert f"{1e3 * result.lanes.exposed:,.1f} ms are exposed" in table
    assert "<strong>256 MiB</strong> (chosen)" in table
    assert table.count("<tr>") == 1 + len(buckets.CAPS)
    once, _ = buckets.words(buckets.compute(**JOB, bucket=16384 * MIB))
    assert "1 all-reduce over" in once


def test_the_picture_has_a_bar_for_each_span_and_hatches_what_is_exposed():
    figure = new_figure()
    update = buckets.draw(figure.add_subplot())
    for cap in (25 * MIB, 16384 * MIB):  # an update moves what is there
        result = buckets.compute(**JOB, bucket=cap)
        update(result)
        lanes, curve = figure.axes
        backward, all_reduce = lanes.collections
        assert len(backward.get_paths()) == len(result.blocks)
        assert len(all_reduce.get_paths()) == len(result.lanes.communication)
        (hatched,) = lanes.patches
        assert hatched.get_x() == pytest.approx(1e3 * result.lanes.compute_end)
        assert hatched.get_width() == pytest.approx(1e3 * result.lanes.exposed)
        assert lanes.get_xlim()[1] == pytest.approx(1e3 * result.lanes.end)
        _, chosen = curve.lines
        assert list(chosen.get_xdata()) == [cap]


@pytest.mark.parametrize(
    ("control", "value"),
    [("bucket", 64 * MIB), ("ranks", 8), ("tokens", 1024), ("model", "gpt2-xl")],
)
def test_moving_a_control_changes_picture_and_table(control, value):
    explorer = explorers.bucket_overlap()
    picture, table = explorer.html.split("</figure>")
    explorer.controls[control].value = value
    assert explorer.html.split("</figure>")[0] != picture
    assert explorer.html.split("</figure>")[1] != table


def test_the_stored_output_reads_without_a_kernel():
    bundle = explorers.bucket_overlap()._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in bundle
    assert re.search(r'alt="Two lanes .+ exposed\."', bundle["text/html"])
