"""The network price explorer without a browser: numbers, words, the picture's parts."""

import pytest

from course_lib import comm, explorers
from course_lib.explorers import network
from course_lib.figures.cost_curves import SIZES, CostCurves, Curve
from course_lib.figures.image import new_figure
from course_lib.specs import Collective

MIB = 2**20


@pytest.mark.parametrize("kind", network.KINDS)
@pytest.mark.parametrize("ranks", [2, 8, 4096])
@pytest.mark.parametrize("size", [SIZES[0], 64 * MIB, SIZES[-1]])
def test_the_price_is_the_librarys(kind, ranks, size):
    result = network.compute(kind, size, ranks, "PCIe 5")
    for name, price in result.prices.items():
        expected = comm.seconds(Collective(kind, size, 1, ranks), network.NETWORKS[name])
        assert price.seconds == pytest.approx(expected)


def test_the_prices_by_hand():
    # 14 steps of 14 µs, and 2 · 7/8 · 64 MiB over 50 GB/s
    price = network.compute("all_reduce", 64 * MIB, 8, "InfiniBand NDR").prices["InfiniBand NDR"]
    assert price.latency == pytest.approx(14 * 14e-6)
    assert price.transfer == pytest.approx(1.75 * 64 * MIB / 50e9)
    assert price.half == pytest.approx(8 * 14e-6 * 50e9)


@pytest.mark.parametrize(("size", "rules"), [(64 * 1024, "latency"), (2**30, "bandwidth")])
def test_the_words_say_what_rules(size, rules):
    alt, table = network.words(network.compute("all_gather", size, 8, "NVLink 4"))
    assert f"most of it {rules}" in table and "<strong>NVLink 4</strong> (chosen)" in table
    assert all(name in alt and name in table for name in network.NETWORKS)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(3.4e-6, "3.40 µs"), (0.0123, "12.3 ms"), (2.5, "2.50 s"), (0, "0.00 µs")],
)
def test_durations_have_three_digits_and_a_unit(seconds, words):
    assert network.duration(seconds) == words


def test_moving_a_control_changes_picture_and_table():
    explorer = explorers.network_price()
    for control, value in (("ranks", 512), ("size", 2**30), ("kind", "all_gather")):
        before = explorer.html
        explorer.controls[control].value = value
        assert explorer.html != before and "<table>" in explorer.html and "<img" in explorer.html


def test_a_curve_is_dotted_up_to_where_both_parts_cost_the_same():
    axes = new_figure().add_subplot()
    curves = CostCurves(axes, "abcd")
    artists = len(axes.get_children())
    shown = {name: Curve(latency=1e-5, per_byte=1e-10 / (i + 1)) for i, name in enumerate("abcd")}
    curves.update(shown, 64 * MIB, "b")
    dotted, solid, mark = curves._parts["b"]
    assert shown["b"].seconds(shown["b"].half) == pytest.approx(2e-5)
    assert dotted.get_xdata()[-1] == solid.get_xdata()[0] == mark.get_xdata()[0] == shown["b"].half
    assert dotted.get_linestyle() == ":" and solid.get_linestyle() == "-"
    assert solid.get_linewidth() > curves._parts["a"][1].get_linewidth()
    assert len(axes.get_children()) == artists
    assert len({mark.get_marker() for _, _, mark in curves._parts.values()}) == 4


@pytest.mark.parametrize("half", [1, 2**50])
def test_a_curve_may_be_all_latency_or_all_bandwidth(half):
    curves = CostCurves(new_figure().add_subplot(), "abcd")
    curves.update({name: Curve(half * 1e-10, 1e-10) for name in "abcd"}, SIZES[0], "a")
    dotted, solid, _ = curves._parts["a"]
    assert (len(dotted.get_xdata()) == 1) == (half == 1)
    assert (len(solid.get_xdata()) == 1) == (half > 1)
