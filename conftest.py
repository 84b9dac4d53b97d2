"""How pytest treats the course's notebooks, beyond what nbval does by itself.

pytest --nbval --nbval-current-env solutions          stored outputs compared
pytest --nbval-lax --nbval-current-env notebooks      unsolved: the checks fail, nothing else
"""

from pathlib import Path

import pytest

# A check's report holds the seed of its cases, which are fresh at each run.
NOT_COMPARED = ("application/vnd.course.report+json",)
SANITIZE = Path(__file__).parent / "tests" / "notebooks" / "sanitize.cfg"


def pytest_configure(config):
    if getattr(config.option, "nbval", False) and not config.option.nbval_sanitize_with:
        config.option.nbval_sanitize_with = str(SANITIZE)


def pytest_itemcollected(item):
    if _is_cell(item):
        notebook = item.parent
        notebook.skip_compare = tuple(dict.fromkeys((*notebook.skip_compare, *NOT_COMPARED)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """nbval lets a cell with the tag raises-exception pass whether or not it raises: it must."""
    yield
    if _is_cell(item) and item.options["check_exception"]:
        raised = any(output.output_type == "error" for output in item.test_outputs)
        if not raised:
            item.raise_cell_error("The cell has the tag raises-exception, but raised nothing")


def _is_cell(item) -> bool:
    return type(item).__name__ == "IPyNbCell"
