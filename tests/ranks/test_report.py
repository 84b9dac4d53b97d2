"""What went wrong, in words: who is blamed, what is shown of a stack, what is left out."""

import os
import pickle
import sysconfig

import pytest

from course_lib.ranks import report, stack, words
from course_lib.ranks.protocol import Died, Frame, Raised, Returned, Unfinished, Unsendable

DONE = Returned(b"")
TORCH = os.path.join(sysconfig.get_path("purelib"), "torch/distributed/")
HERE = Frame(__file__, 1, "train")  # the first line of this file: its docstring
BARRIER = (
    HERE,
    Frame(TORCH + "c10d_logger.py", 83, "wrapper"),
    Frame(TORCH + "distributed_c10d.py", 5000, "barrier"),
)


@pytest.mark.parametrize(
    ("ranks", "name"),
    [
        ([2], "rank 2"),
        ([0, 1], "ranks 0 and 1"),
        ([0, 1, 3], "ranks 0, 1 and 3"),
        ([0, 1, 2, 3], "ranks 0-3"),
        ([0, 1, 2, 5, 7], "ranks 0-2, 5 and 7"),
    ],
)
def test_names_of_ranks(ranks, name):
    assert words.names(ranks) == name


def test_ranks_that_fail_alike_are_told_once():
    text = str(report.error([Raised("ValueError", "it was bad")] * 4, 60))
    assert text == "ranks 0-3 raised ValueError: it was bad"


def test_ranks_that_fail_each_in_its_way_are_not_all_told():
    text = str(report.error([Raised("KeyError", str(rank)) for rank in range(8)], 60))
    assert [line[:21] for line in text.splitlines()[:2]] == ["rank 0 raised KeyErro"] + [
        "rank 1 raised KeyErro"
    ]
    assert text.splitlines()[-1] == "… and 4 other errors on other ranks"


def test_a_rank_that_lost_its_peer_waits_and_is_not_blamed():
    lost = Raised("RuntimeError", "[pair.cc:553] Connection closed by peer [::1]:2", BARRIER)
    text = str(report.error([lost, lost, Died(-9), Unfinished(BARRIER)], 60))
    head, waiting = text.splitlines()
    assert head == "rank 2 died before returning: signal SIGKILL (often: out of memory)"
    assert waiting.startswith("ranks 0, 1 and 3 were in barrier, ")


def test_lost_peers_alone_are_blamed():
    lost = Raised("RuntimeError", "Connection closed by peer")
    assert str(report.error([DONE, lost], 60)) == "rank 1 raised RuntimeError: " + lost.message


def test_timeout_says_where_each_was():
    error = report.error([DONE, DONE, Unfinished(BARRIER), DONE], 3)
    assert isinstance(error, report.RankTimeout)
    head, late, done = str(error).splitlines()
    assert head == "the ranks were ended because they had not finished within 3 s"
    assert late.startswith("  rank 2 was in barrier, ")
    assert late.endswith('test_report.py, line 1: """' + __doc__.splitlines()[0] + '"""')
    assert done == "  ranks 0, 1 and 3 had finished"


def test_only_the_learners_frames_are_shown():
    text = str(report.error([Raised("ValueError", "no", BARRIER)], 60))
    assert len(text.splitlines()) == 3
    assert "line 1, in train" in text and "c10d" not in text


def test_the_last_frame_is_shown_where_none_is_the_learners():
    text = str(report.error([Raised("ValueError", "no", BARRIER[1:])], 60))
    assert "  torch/distributed/distributed_c10d.py, line 5000, in barrier" in text


def test_deep_stacks_and_long_messages_are_cut():
    text = str(report.error([Raised("RecursionError", "deep", (HERE,) * 1000)], 60))
    assert "  …" in text.splitlines() and len(text.splitlines()) < 20
    text = str(report.error([Raised("ValueError", "line\n" * 1000)], 60))
    assert text.splitlines()[-1] == "… 980 more lines"
    native = "bad shape\nException raised from f at x.cpp:3\nframe #0: g"
    assert str(report.error([Raised("RuntimeError", native)], 60)).endswith(": bad shape")


def test_what_cannot_be_sent_back_is_named():
    text = str(report.error([DONE, Unsendable("generator", "cannot pickle it")], 60))
    assert text.startswith(
        "rank 1 returned a generator that cannot be sent back (cannot pickle it)"
    )


def test_a_notebook_shows_the_sentence_and_no_traceback():
    error = report.error([Raised("ValueError", "no", (HERE,))], 60)
    assert (
        error._render_traceback_()
        == ["RankError: " + str(error).splitlines()[0]] + (str(error).splitlines()[1:])
    )


def test_an_error_can_be_sent_on():
    error = pickle.loads(pickle.dumps(report.error([DONE, Died(3)], 60)))
    assert error.outcomes == (DONE, Died(3)) and "exit code 3" in str(error)


@pytest.mark.parametrize(
    ("file", "learner"),
    [
        (__file__, True),
        ("<stdin>", True),
        ("/tmp/ipykernel_1/123.py", True),
        (os.__file__, False),
        (report.__file__, False),
        (TORCH + "distributed_c10d.py", False),
        ("<frozen importlib._bootstrap>", False),
    ],
)
def test_whose_line_it_is(file, learner):
    assert stack.learners(Frame(file, 1, "f")) is learner


def test_a_rank_at_work_outside_any_library_call():
    assert stack.whereabouts((HERE,)).startswith("at ")
    assert stack.whereabouts(()) == "at work"
    assert stack.whereabouts(BARRIER[1:]) == "in barrier"


@pytest.mark.parametrize("header", ["Current thread", "Thread"])
@pytest.mark.parametrize("name", ["", " [python]"])
def test_the_main_threads_stack_is_read(header, name):
    text = (
        "7f01\n"
        "Thread 0x00007f02 (most recent call first):\n"
        '  File "/other.py", line 1 in other\n'
        "\n"
        f"{header} 0x0000000000007f01{name} (most recent call first):\n"
        f'  File "{TORCH}distributed_c10d.py", line 5000 in barrier\n'
        '  File "/my train.py", line 9 in <lambda>\n'
    )
    tail = f'  File "{stack.RANK}", line 61 in _work\n  File "{stack.RANK}", line 40 in main\n'
    frames, whole = stack.dumped(text + tail)
    assert [frame.function for frame in frames] == ["<lambda>", "barrier"]
    assert frames[0] == Frame("/my train.py", 9, "<lambda>") and whole
    assert stack.dumped(text) == (frames, False)
    assert stack.dumped("7f01\n") == ((), False)
