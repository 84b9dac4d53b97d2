"""The command as a learner calls it: in a process of its own."""

import subprocess
import sys

import pytest

from course_lib.cli import COMMANDS

# Each of these takes longer to load than `course ledger` may take to answer, or a good part of it.
HEAVY = {
    "IPython", "jupyterlab", "matplotlib", "nbformat", "numpy", "pydantic", "torch", "transformers"
}  # fmt: skip


def python(*arguments: str, cwd=None) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize("module", ["course_lib", "course_lib.cli", "course_lib.cli.doctor"])
def test_importing_loads_nothing_heavy(module):
    code = f"import sys, {module}; print(*sorted({HEAVY!r} & set(sys.modules)))"
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_help_lists_every_command_and_loads_nothing_heavy():
    code = (
        "import sys\nfrom course_lib.cli import main\nsys.argv = ['course', '--help']\n"
        "try: main()\nexcept SystemExit: pass\nprint('torch' in sys.modules)"
    )
    result = python("-c", code)
    lines = result.stdout.splitlines()
    for command in COMMANDS:
        assert any(f" {command} " in line for line in lines), command
    assert lines[-1] == "False"


def test_the_ledger_answers_without_anything_heavy():
    code = (
        "import sys\nfrom course_lib.cli import main\n"
        "sys.argv = ['course', 'ledger', '--model', 'gpt2-xl', '--json']\n"
        f"try: main()\nfinally: print(*sorted({HEAVY!r} & set(sys.modules)))"
    )
    result = python("-c", code)
    assert result.returncode == 0, result.stderr
    assert result.stdout.splitlines()[-1] == "", "pydantic comes with typer from 0.29 on"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_has_help(command, course):
    result = course(command, "--help")
    assert result.exit_code == 0
    assert command in result.stdout


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (["check", "nowhere.ipynb"], "There is no notebook nowhere.ipynb"),
        (["check", "99"], "There is no lesson '99'"),
        (["reset", "99"], "There is no lesson '99'"),
        (["nothing"], "No such command 'nothing'"),
        (["check", "--nothing", "01"], "No such option"),
    ],
)
def test_bad_input_is_a_sentence_and_exit_code_2(arguments, sentence, root):
    result = python("-m", "course_lib.cli", *arguments, cwd=root)
    assert result.returncode == 2
    assert sentence in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_damaged_progress_file_is_a_sentence_and_exit_code_2(root):
    file = root / "work/.course/progress.jsonl"
    file.parent.mkdir(parents=True)
    file.write_text("not JSON\n")
    result = python("-m", "course_lib.cli", "progress", cwd=root)
    assert result.returncode == 2
    assert "was damaged: it was moved to" in result.stderr
    assert "Traceback" not in result.stderr
    assert len(list(file.parent.glob("*.damaged-*"))) == 1


def test_a_defect_keeps_its_traceback(root):
    code = (
        "from course_lib import cli\nfrom course_lib.cli import workspace\n"
        "def broken(*_): raise RuntimeError('a defect')\n"
        "workspace.find_root = broken\n"
        "import sys\nsys.argv = ['course', 'reset', '01']\ncli.main()"
    )
    result = python("-c", code, cwd=root)
    assert result.returncode == 1
    assert "Traceback" in result.stderr and "a defect" in result.stderr
