"""Every way a run can go wrong ends all ranks and is told. Words are test_report's subject."""

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest
import torch
import torch.distributed as dist
from failing import FAILURES, PREAMBLE
from limits import must_end_within

from course_lib import ranks


def message(fn, **options) -> str:
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(fn, **options)
    return str(caught.value)


@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_is_a_sentence_well_before_the_deadline(name, tmp_path):
    failure, path = FAILURES[name], tmp_path / "learner.py"
    path.write_text(failure.source)
    globals_ = {"__name__": "learner"}
    exec(PREAMBLE, globals_)
    with must_end_within(60), pytest.raises(getattr(ranks, failure.error)) as caught:
        exec(compile(failure.source, str(path), "exec"), globals_)
    assert type(caught.value).__name__ == failure.error
    lines = str(caught.value).splitlines()
    for line, told in zip(lines, failure.told, strict=True):
        assert line.startswith(told.format(here=path))


def test_prints_are_shown_when_a_rank_fails(capsys):
    def fn():
        print("before")
        os._exit(1)

    message(fn, world_size=1)
    assert capsys.readouterr().out == "rank 0 | before\n"


def test_the_exception_itself_is_the_cause():
    class Own(Exception):
        pass

    def fn():
        raise Own("mine")

    with pytest.raises(ranks.RankError) as caught:
        ranks.run(fn, world_size=2)
    assert type(caught.value.__cause__) is Own


def test_exception_that_cannot_be_sent_is_still_told():
    class Own(Exception):
        def __init__(self, one, two):
            super().__init__(f"{one} and {two}")

    def fn():
        raise Own(1, 2)

    assert message(fn).startswith("ranks 0-3 raised Own: 1 and 2\n")


def test_sys_exit_is_told_as_such():
    assert message(lambda: sys.exit(3), world_size=2).startswith(
        "ranks 0 and 1 raised SystemExit: 3"
    )


def test_deadline_holds_while_the_interpreter_is_locked():
    assert "sum(range(10**12))" in message(lambda: sum(range(10**12)), world_size=1, timeout=1)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        (lambda: os._exit(3), "exit code 3"),
        (lambda: os._exit(0), "exit code 0"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "signal SIGKILL"),
    ],
)
def test_a_death_is_blamed_on_the_dead(end, told):
    def fn():
        if dist.get_rank() == 2:
            end()
        dist.all_reduce(torch.ones(4))

    text = message(fn)
    assert text.startswith(f"rank 2 died before returning: {told}")
    assert "ranks 0, 1 and 3 were in all_reduce" in text
    assert "onnection" not in text


def test_results_that_cannot_be_sent_are_named():
    text = message(lambda: (x for x in "ab"), world_size=2)
    assert text.startswith("ranks 0 and 1 returned a generator that cannot be sent back")


def test_a_sharded_tensor_is_refused_with_the_way_out():
    def fn():
        from torch.distributed.fsdp import fully_shard

        return fully_shard(torch.nn.Linear(4, 4)).weight

    assert ".full_tensor()" in message(fn, world_size=2)


def test_nested_run_is_refused():
    assert "ranks.run was called inside a rank" in message(
        lambda: ranks.run(dist.get_rank), world_size=2
    )


def test_a_rank_may_start_workers_and_they_end_with_it():
    def fn():
        return subprocess.Popen(["sleep", "600"]).pid

    (pid,) = ranks.run(fn, world_size=1)
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.05)  # killed, and soon gone; the limit of conftest applies


def test_an_interrupt_ends_all_ranks_and_tells_where_they_were(tmp_path):
    def fn():
        (tmp_path / str(dist.get_rank())).touch()
        if dist.get_rank():
            dist.barrier()
        time.sleep(600)

    def interrupt():
        while len(list(tmp_path.iterdir())) < 4:
            time.sleep(0.02)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(ranks.RankInterrupt) as caught:
            ranks.run(fn)
    finally:
        signal.signal(signal.SIGINT, before)
    head, sleeping, waiting = str(caught.value).splitlines()
    assert head == "the ranks were ended"
    assert sleeping.startswith("  rank 0 was at ") and "time.sleep(600)" in sleeping
    assert waiting.startswith("  ranks 1-3 were in barrier #1, ")
    assert isinstance(caught.value, KeyboardInterrupt)
