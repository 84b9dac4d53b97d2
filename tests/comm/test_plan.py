"""A plan as data and as a table."""

import json
from html.parser import HTMLParser

from course_lib import comm, measure
from course_lib.specs import Recipe, Strategy, model

LAB = model("lab-25m")
PLAN = comm.step(LAB, Recipe("fp32", grad_accum=4), Strategy("fsdp", 4))


def test_plain_data_adds_up():
    data = json.loads(json.dumps(PLAN.to_dict()))
    assert set(data) == {"per_step", "total_bytes_per_rank"}
    assert sum(line["bytes_per_rank"] for line in data["per_step"]) == data["total_bytes_per_rank"]
    assert [(line["collective"], line["count"]) for line in data["per_step"]] == [
        ("all_gather", 36),
        ("all_gather", 32),
        ("reduce_scatter", 36),
    ]
    assert all(
        set(line) == {"collective", "count", "bytes_per_rank", "why"} for line in data["per_step"]
    )


def test_kinds_add_up_as_a_log_counts_them():
    assert PLAN.counts() == {"all_gather": 68, "reduce_scatter": 36}
    gathered = sum(line.bytes_per_rank for line in PLAN.lines[:2])
    assert PLAN.bytes_by_kind()["all_gather"] == gathered
    assert PLAN.by_kind()["all_gather"] == (68, gathered)
    assert sum(PLAN.bytes_by_kind().values()) == PLAN.bytes_per_rank
    assert measure.receipt("fsdp", PLAN.bytes_by_kind(), PLAN.bytes_by_kind()).balances


def test_the_table_in_words():
    title, head, *rows = repr(PLAN).splitlines()
    assert title == (
        "lab-25m, 24,771,150 parameters; fp32; fsdp on 4 ranks, 4 micro-batches a step"
    )
    assert head.split() == ["per", "rank", "and", "step", "count", "bytes", "why"]
    assert [row.split()[0] for row in rows] == [
        "all_gather",
        "all_gather",
        "reduce_scatter",
        "total",
    ]
    assert "4 × 9" in rows[0] and "parameters of each unit, for forward" in rows[0]
    assert f"{PLAN.bytes_per_rank:,}" in rows[-1]
    assert max(map(len, repr(PLAN).splitlines())) <= 100


def test_buckets_that_are_alike_stand_in_a_line_once():
    plan = comm.step(LAB, Recipe("fp32", grad_accum=2), Strategy("zero2", 4), bucket_bytes=2**20)
    scattered = plan.lines[0]
    (full, often), (last, once) = scattered.runs
    assert (often, once) == (94, 1) and last.elements < full.elements
    assert scattered.in_a_round == 95 and scattered.count == 190
    total = 2 * (94 * full.bytes_per_rank + last.bytes_per_rank)
    assert scattered.bytes_per_rank == plan.to_dict()["per_step"][0]["bytes_per_rank"] == total
    assert "2 × 95" in repr(plan).splitlines()[2]


def test_one_rank_and_one_micro_batch_are_singular():
    plan = comm.step(LAB, Recipe(), Strategy("ddp"))
    assert "ddp on 1 rank, 1 micro-batch a step" in repr(plan)


class Cells(HTMLParser):
    def __init__(self):
        super().__init__()
        self.rows, self.inside = [], False

    def handle_starttag(self, tag, attrs):
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        if self.inside:
            self.rows[-1][-1] += data


def test_the_html_has_the_same_cells():
    cells = Cells()
    cells.feed(PLAN._repr_html_())
    assert len(cells.rows) == len(repr(PLAN).splitlines()) - 1
    assert {len(row) for row in cells.rows} == {5}
    assert cells.rows[1][:2] == ["all_gather", "4 × 9"]


def test_a_name_from_outside_is_escaped():
    plan = comm.Plan("<b>", PLAN.lines)
    assert "<b>" not in plan._repr_html_()
    assert "&lt;b&gt;" in plan._repr_html_()
