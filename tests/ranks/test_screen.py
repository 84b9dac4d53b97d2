"""What is shown while ranks run: prints as they come, one line of progress. No process runs."""

import io
import sys
from pathlib import Path

import pytest

from course_lib.ranks import progress
from course_lib.ranks.output import Output
from course_lib.ranks.protocol import Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(b"", world_size=2, folder=tmp_path, timeout=60, seed=0, environment={})


def write(job: Job, rank: int, text: bytes) -> None:
    with job.output(rank).open("ab") as file:
        file.write(text)


def test_whole_lines_come_first_and_the_rest_at_the_end(job, capsys):
    output = Output(job)
    write(job, 1, b"one\ntwo")
    assert output.waits()
    output.show()
    assert capsys.readouterr().out == "rank 1 | one\n"
    write(job, 1, b" and more\n\n")
    write(job, 0, "é".encode()[:1])  # half a letter
    output.show()
    assert capsys.readouterr().out == "rank 1 | two and more\nrank 1 | \n"
    write(job, 0, "é".encode()[1:])
    output.show(end=True)
    assert capsys.readouterr().out == "rank 0 | é\n"
    assert not output.waits()


def test_each_rank_is_shown_up_to_a_limit(job, capsys):
    output = Output(job)
    for _ in range(3):
        write(job, 0, b"x" * 30_000 + b"\n")
        output.show()
    write(job, 1, b"heard\n")
    output.show(end=True)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["rank 0 | … 24,467 more bytes", "rank 1 | heard"]
    assert sum(map(len, lines)) < 70_000


@pytest.mark.parametrize(
    ("latest", "told"),
    [
        (["", ""], ""),
        (["all_reduce #31", "all_reduce #31"], "; last: all_reduce #31 on ranks 0 and 1"),
        (["send #2", ""], "; last: send #2 on rank 0"),
        (["send #2", "recv #1"], "; last: send #2 on rank 0, recv #1 on rank 1"),
    ],
)
def test_the_line_of_progress(latest, told):
    assert progress.line(2, 12.3, 60, latest) == "2 ranks, 12 s of at most 60 s" + told


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> str:
        """What is to be read in the last line."""
        cells, at = [], 0
        for letter in self.getvalue():
            if letter == "\r":
                at = 0
            else:
                cells[at : at + 1] = [letter]
                at += 1
        return "".join(cells).rstrip()


def test_in_a_terminal_one_line_is_overwritten_and_then_gone(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    place = progress.place()
    place.show("x" * 100)
    assert sys.stderr.screen() == "x" * 39
    place.show("short")
    assert sys.stderr.screen() == "short"
    place.close()
    assert sys.stderr.screen() == ""


def test_elsewhere_nothing_is_shown(monkeypatch):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    place = progress.place()
    place.show("text")
    place.close()
    assert sys.stderr.getvalue() == ""
