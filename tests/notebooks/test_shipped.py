"""What ships to learners: no solutions, no sources, whole exercises, nothing run but explorers.

These look at the committed files themselves, not through the builder that made them.
"""

import ast
import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "solutions").glob("[0-9][0-9]_*.py"))


@pytest.fixture(params=SOURCES, ids=lambda path: path.stem)
def source(request):
    return request.param


@pytest.fixture
def cells(source):
    """The cells of the learner's notebook, as JSON, with their sources joined."""
    path = ROOT / "notebooks" / source.stem / f"{source.stem}.ipynb"
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell | {"source": "".join(cell["source"])} for cell in cells]


def graded(cells, part):
    return {c["id"]: c for c in cells if c["metadata"].get("nbgrader", {}).get(part)}


def test_no_line_of_a_solution_ships(source):
    regions = re.findall(
        r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", source.read_text("utf-8"), re.DOTALL
    )
    lines = {line.strip() for region in regions for line in region.splitlines()}
    telling = {x for x in lines if len(x) >= 20 and not x.endswith(":") and "import " not in x}
    assert telling
    for path in (ROOT / "notebooks" / source.stem).rglob("*"):
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="ignore")
            assert "END SOLUTION" not in text
            for line in telling:
                assert line not in text and json.dumps(line)[1:-1] not in text, path


def test_no_source_lies_where_nbgrader_would_ship_it(source):
    for folder in ("solutions", "notebooks"):
        inside = [path.name for path in (ROOT / folder / source.stem).rglob("*.py")]
        assert inside == []


def test_each_exercise_is_a_stub_with_a_docstring_that_says_what_to_do(cells):
    for id, cell in graded(cells, "solution").items():
        assert "raise NotImplementedError(" in cell["source"], id
        body = ast.parse(cell["source"]).body
        assert all(
            ast.get_docstring(node)
            for node in body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        ), id


def test_each_exercise_is_followed_by_its_check(cells):
    ids = [cell["id"] for cell in cells]
    exercises, checks = graded(cells, "solution"), graded(cells, "grade")
    assert exercises and set(checks) == {f"check-{id}" for id in exercises}
    for id in exercises:
        check = checks[f"check-{id}"]
        assert ids.index(id) < ids.index(check["id"])
        assert check["source"].startswith(f'check("{id}", ')
        assert "raises-exception" in check["metadata"]["tags"]
        assert check["metadata"]["editable"] is False


def test_each_exercises_heading_says_its_points(cells):
    prose = "\n".join(cell["source"] for cell in cells if cell["cell_type"] == "markdown")
    for id, cell in graded(cells, "grade").items():
        points = cell["metadata"]["nbgrader"]["points"]
        heading = rf"^### Exercise {id.removeprefix('check-')}: .+ \({points} points?\)$"
        assert re.search(heading, prose, re.MULTILINE), id


def test_only_explorers_have_outputs(cells):
    for cell in cells:
        if cell["cell_type"] == "code":
            explorer = "explorer" in cell["metadata"].get("tags", ())
            assert bool(cell["outputs"]) == explorer == (cell["execution_count"] is not None)


def test_ids_are_unique(cells):
    assert len({cell["id"] for cell in cells}) == len(cells)
