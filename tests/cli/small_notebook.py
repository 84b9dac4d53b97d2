"""A notebook made of a few code cells, for tests of the command line."""

import nbformat


def notebook(*cells: str) -> str:
    """The notebook's text, as it would lie in a file."""
    v4 = nbformat.v4
    made = v4.new_notebook(
        cells=[v4.new_code_cell(source, id=f"cell-{n}") for n, source in enumerate(cells)]
    )
    return nbformat.writes(made)
