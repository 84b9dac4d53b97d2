import subprocess
import sys

import pytest

HEAVY = {"torch", "numpy", "matplotlib", "pandas", "transformers", "rich", "IPython"}


@pytest.mark.parametrize("module", ["course_lib.specs", "course_lib.ledger", "course_lib.comm"])
def test_the_pure_floors_import_the_standard_library_alone(module):
    code = (
        f"import sys, {module}; "
        "loaded = {name.partition('.')[0] for name in sys.modules}; "
        "print(*sorted(loaded - sys.stdlib_module_names))"
    )
    before = subprocess.run(
        [sys.executable, "-c", code.replace(f", {module}", "")],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    after = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert set(after) - set(before) == {"course_lib"}


def test_the_command_loads_nothing_heavy():
    code = "import sys, course_lib.cli.ledger; print(*{x.partition('.')[0] for x in sys.modules})"
    loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert HEAVY.isdisjoint(loaded)
