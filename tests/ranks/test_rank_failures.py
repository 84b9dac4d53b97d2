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

from course_lib import ranks


def message(fn, **options) -> str:
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(fn, **options)
    return str(caught.value)


def test_prints_are_shown_when_a_rank_fails(capsys):
    def fn():
        print("before")
        os._exit(1)

    message(fn, world_size=1)
    assert capsys.readouterr().out == "rank 0 | before\n"


def test_rank_that_raises_ends_those_that_wait_for_it():
    def fn():
        if dist.get_rank() == 1:
            raise ValueError("no data")
        dist.barrier()

    text = message(fn)
    assert text.startswith("rank 1 raised ValueError: no data\n")
    assert 'raise ValueError("no data")' in text
    assert "ranks 0, 2 and 3 were in barrier" in text
    assert "course_lib" not in text and "site-packages" not in text


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


def test_infinite_loop_meets_the_deadline():
    def fn():
        rank = dist.get_rank()
        while rank == 2:
            pass

    with pytest.raises(ranks.RankTimeout) as caught:
        ranks.run(fn, timeout=3)
    text = str(caught.value)
    assert "not finished within 3 s" in text
    assert "rank 2 was at " in text and "ranks 0, 1 and 3 had finished" in text


def test_a_rank_waiting_in_vain_says_where():
    def fn():
        if dist.get_rank() == 2:
            dist.barrier()  # the line

    text = message(fn, timeout=2)
    line = fn.__code__.co_firstlineno + 2
    assert "rank 2 was in barrier, " in text
    assert f"test_rank_failures.py, line {line}: dist.barrier()  # the line" in text


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


def test_an_interrupt_ends_all_ranks(tmp_path):
    def fn():
        (tmp_path / str(dist.get_rank())).touch()
        dist.barrier()
        time.sleep(600)

    def interrupt():
        while len(list(tmp_path.iterdir())) < 4:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        threading.Thread(target=interrupt, daemon=True).start()
        with pytest.raises(KeyboardInterrupt):
            ranks.run(fn)
    finally:
        signal.signal(signal.SIGINT, before)
