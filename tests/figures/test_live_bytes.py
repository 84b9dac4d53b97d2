"""The figure of live bytes: no peak is lost to thinning, and the table says what is drawn."""

from course_lib.figures.live_bytes import POINTS, live_bytes, thinned

MIB = 2**20


def test_thinning_keeps_the_peak_and_short_curves_whole():
    moments = [{"activations": i % 7} for i in range(10_000)]
    moments[4_321] = {"activations": 99, "gradients": 1}
    starts, fullest = thinned(moments)
    assert len(starts) == len(fullest) <= POINTS
    assert moments[4_321] in fullest
    assert thinned(moments[:POINTS])[1] == moments[:POINTS]


def test_the_table_has_the_peak_of_each_step_and_no_category_without_bytes():
    first = [{"parameters": 4 * MIB, "other": 0}, {"parameters": 4 * MIB, "gradients": 2 * MIB}]
    second = [{"parameters": MIB}]
    page = live_bytes({"one": (first, 1), "two": (second, 1)}, "Two steps.")
    assert page.startswith("<img") and 'alt="Two steps."' in page
    assert "<tr><td>parameters</td><td>4.00 MiB</td><td>1.00 MiB</td></tr>" in page
    assert "<tr><td>together</td><td>6.00 MiB</td><td>1.00 MiB</td></tr>" in page
    assert "other" not in page.split("<table>")[1]
