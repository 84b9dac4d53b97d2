"""No text of a solution reaches a learner, wherever it hides."""

import nbformat
import pytest

from course_lib.authoring.leaks import refuse_leaks, refuse_leaks_in_files, secrets
from course_lib.authoring.source import read
from course_lib.errors import CourseError

SECRET = "twice_the_number = n + n"


def notebook(*cells, **metadata):
    return nbformat.v4.new_notebook(cells=list(cells), metadata=metadata)


def code(source="1", **data):
    outputs = [nbformat.v4.new_output("display_data", data)] if data else []
    return nbformat.v4.new_code_cell(source, id="here", outputs=outputs)


def test_secrets_are_lines_of_their_own_and_whole_solutions(lesson):
    found = secrets(read(lesson))
    assert SECRET in found
    assert "return n / 2" in found  # short, but the whole solution
    assert f"{SECRET}\nreturn twice_the_number" in found


@pytest.mark.parametrize("line", ["import torch.distributed as dist", "for rank in range(world):"])
def test_what_stands_in_any_program_is_no_secret(lesson, edit, line):
    edit(lesson, SECRET, f"twice_the_number = n + n\n    {line}")
    assert line not in secrets(read(lesson))


@pytest.mark.parametrize(
    "leaking",
    [
        notebook(code(f"def f(n):\n        {SECRET}")),
        notebook(nbformat.v4.new_markdown_cell(f"Try `{SECRET}`.", id="here")),
        notebook(code(**{"text/html": "<pre>twice_the_number &#61; n + n</pre>"})),
        notebook(code(**{"application/json": {"deep": [{"er": SECRET}]}})),
        notebook(code(**{"application/json": {SECRET: 1}})),
        notebook(code(), course={"task": SECRET}),
        notebook(code("x = 1\n\n\n      return n / 2")),
        notebook(code("### BEGIN SOLUTION")),
        notebook(code("### END HIDDEN TESTS")),
    ],
)
def test_a_leak_is_found(lesson, leaking):
    with pytest.raises(CourseError, match="^Lesson 01: .* shows text of a solution"):
        refuse_leaks(leaking, secrets(read(lesson)), lesson)


def test_the_sentence_names_the_cell_and_the_text(lesson):
    with pytest.raises(CourseError, match="cell here .* 'twice_the_number = n \\+ n'"):
        refuse_leaks(notebook(code(SECRET)), secrets(read(lesson)), lesson)


def test_a_notebook_without_leaks_passes(lesson):
    refuse_leaks(notebook(code("n + n\nreturn n")), secrets(read(lesson)), lesson)


def test_other_files_are_searched(lesson, tmp_path):
    folder = tmp_path / "released"
    folder.mkdir()
    (folder / "data.json").write_text("{}")
    refuse_leaks_in_files(folder, secrets(read(lesson)), lesson)
    (folder / "notes.txt").write_text(f"  {SECRET}\n")
    with pytest.raises(CourseError, match="^Lesson 01: notes.txt shows"):
        refuse_leaks_in_files(folder, secrets(read(lesson)), lesson)
