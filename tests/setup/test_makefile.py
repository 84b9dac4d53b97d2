"""`make lab` and `make test`: set up once, start at once, and say what is wrong in a sentence.

`make` runs for real, in a copy of what it reads; a small shell script stands for Python, makes an
"environment" that writes down how it was called, and takes no time.
"""

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="there is no make here")

# Called as `PYTHON -m venv FOLDER`, it makes FOLDER/bin/python and FOLDER/bin/course.
STAND_IN = """#!/bin/sh
echo "python $*" >> "$CALLS"
case "$*" in
    "-c import sys"*) exit {old} ;;
    "-c import ensurepip"*) exit {no_venv} ;;
    --version) echo "Python 3.8.18" ;;
    "-m venv"*)
        mkdir -p "$3/bin"
        for name in python course; do
            {{
                echo '#!/bin/sh'
                echo 'echo "env-'$name' $*" >> "$CALLS"'
                echo 'case "$*" in *pip*) exit $PIP_EXITS ;; esac'
            }} > "$3/bin/$name"
            chmod +x "$3/bin/$name"
        done ;;
esac
"""


class Copy:
    """A folder with the course's Makefile, and a stand-in for Python."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.calls_file = folder / "calls"
        for name in ("Makefile", "pyproject.toml", "requirements.lock"):
            shutil.copy(ROOT / name, folder)
        self.python()

    def python(self, old: int = 0, no_venv: int = 0) -> None:
        script = self.folder / "python-stand-in"
        script.write_text(STAND_IN.format(old=old, no_venv=no_venv))
        script.chmod(script.stat().st_mode | stat.S_IXUSR)

    def make(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """Run make; afterwards `calls` holds what this run called."""
        self.calls_file.write_text("")
        settings = {
            "PATH": os.environ["PATH"],  # and nothing of a `make test` that this may run under
            "PYTHON": str(self.folder / "python-stand-in"),
            "CALLS": str(self.calls_file),
            "MIN_FREE_GIB": "0",
            "PIP_EXITS": "0",
        }
        return subprocess.run(
            ["make", *arguments],
            cwd=self.folder,
            env=settings | environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    @property
    def calls(self) -> list[str]:
        return self.calls_file.read_text().splitlines()

    def install(self) -> list[str]:
        return [call for call in self.calls if "pip install" in call]


@pytest.fixture
def copy(tmp_path) -> Copy:
    return Copy(tmp_path)


def test_lab_sets_up_under_the_lock_and_passes_options_on(copy):
    result = copy.make("lab", "LAB_ARGS=--no-browser --port 8899", "PIP_ARGS=--quiet")
    assert result.returncode == 0, result.stderr
    assert copy.install() == [
        "env-python -m pip install --disable-pip-version-check --quiet -c requirements.lock -e ."
    ]
    assert copy.calls[-1] == "env-course lab --no-browser --port 8899"


def test_a_second_run_does_no_set_up_again(copy):
    copy.make("lab")
    assert copy.make("lab").returncode == 0
    assert copy.calls == ["env-course lab"]


def test_tests_need_the_extra_and_then_lab_starts_at_once(copy):
    copy.make("test", "TEST_ARGS=-k pins")
    assert copy.install()[0].endswith("-c requirements.lock -e .[dev]")
    assert copy.calls[-1] == "env-python -m pytest -n 2 --dist loadfile -k pins"
    copy.make("lab")
    assert copy.install() == []


def test_tests_after_lab_install_the_extra(copy):
    copy.make("lab")
    copy.make("test")
    assert len(copy.install()) == 1
    copy.make("test")
    assert copy.install() == []


@pytest.mark.parametrize("name", ["pyproject.toml", "requirements.lock"])
def test_a_changed_pin_sets_up_again(copy, name):
    copy.make("lab")
    later = (copy.folder / ".venv/.ready").stat().st_mtime + 5
    os.utime(copy.folder / name, (later, later))
    copy.make("lab")
    assert len(copy.install()) == 1


def test_an_interrupted_set_up_goes_on_next_time(copy):
    stopped = copy.make("lab", PIP_EXITS="1")
    assert stopped.returncode != 0
    assert "The set-up stopped, with" in stopped.stderr and "repeat the command" in stopped.stderr
    assert not (copy.folder / ".venv/.ready").exists()
    assert "env-course lab" not in copy.calls
    assert copy.make("lab").returncode == 0
    assert len(copy.install()) == 1


@pytest.mark.parametrize("target", ["lab", "test", "build", "bench", "setup"])
def test_an_old_python_is_a_sentence(copy, target):
    copy.python(old=1)
    result = copy.make(target)
    assert result.returncode != 0
    assert "is Python 3.8.18, and the course needs Python 3.11 or newer" in result.stderr
    assert not (copy.folder / ".venv").exists()


def test_no_python_is_a_sentence(copy):
    result = copy.make("lab", PYTHON="no-such-python")
    assert result.returncode != 0
    assert "No 'no-such-python' on this machine: install Python 3.11" in result.stderr


def test_a_python_without_venv_is_a_sentence(copy):
    copy.python(no_venv=1)
    result = copy.make("lab")
    assert result.returncode != 0
    assert "cannot make virtual environments: install its venv module" in result.stderr


def test_a_full_disk_is_a_sentence(copy):
    result = copy.make("lab", MIN_FREE_GIB="1000000000")
    assert result.returncode != 0
    assert "GiB of disk are free here, and the set-up needs 1000000000" in result.stderr
    assert not (copy.folder / ".venv").exists()


def test_make_alone_lists_the_targets(copy):
    listed = {line.split()[1] for line in copy.make().stdout.splitlines()}
    assert {"lab", "test", "build", "bench", "lock", "setup"} <= listed


def test_the_container_calls_targets_that_exist():
    import json

    container = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    makefile = (ROOT / "Makefile").read_text()
    for key in ("postCreateCommand", "postAttachCommand"):
        words = container[key].split()
        assert words[0] == "make" and f"\n{words[1]}: " in makefile


def test_ci_is_what_needs_root_and_then_make_test():
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    lines = script.read_text().splitlines()
    assert "set -euo pipefail" in lines and lines[-1] == "make test"
