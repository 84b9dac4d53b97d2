"""ranks.run from this process: results, prints, failures. Words are test_report's subject."""

import os
import random
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from course_lib import ranks
from course_lib.errors import CourseError


def whoami() -> tuple[int, int]:  # a function of an importable module travels by reference
    return dist.get_rank(), dist.get_world_size()


def message(fn, **options) -> str:
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(fn, **options)
    return str(caught.value)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
def test_results_come_in_rank_order(world_size):
    assert ranks.run(whoami, world_size=world_size) == [(r, world_size) for r in range(world_size)]


def test_ranks_communicate_with_the_arguments_given():
    def fn(values, scale):
        mine = values[dist.get_rank()] * scale
        dist.all_reduce(mine)
        return mine

    values = torch.arange(12.0).reshape(3, 4)
    results = ranks.run(fn, world_size=3, args=(values, 2))
    for result in results:
        torch.testing.assert_close(result, values.sum(0) * 2)


def test_training_step_runs():
    def fn():
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(3, 4)).sum().backward()
        optimizer.step()
        return model.module.weight

    first, second = ranks.run(fn, world_size=2)
    torch.testing.assert_close(first, second)  # different data, averaged gradients


def test_results_are_what_they_were():
    class Box:
        def __init__(self, value):
            self.value = value

    def fn():
        base = torch.arange(6.0)
        return {"box": Box(1), "views": (base[:2], base[2:]), "none": None, "call": lambda: 3}

    (result,) = ranks.run(fn, world_size=1)
    assert type(result["box"]) is Box
    assert result["none"] is None and result["call"]() == 3
    one, other = result["views"]
    assert one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def test_large_result_arrives_whole():
    results = ranks.run(lambda: torch.full((2_000_000,), float(dist.get_rank())), world_size=2)
    assert [float(r.mean()) for r in results] == [0.0, 1.0]


def test_each_rank_draws_its_own_numbers_and_the_same_each_time():
    def fn():
        return float(torch.rand(())), random.random(), float(np.random.rand())

    first, again, other = ranks.run(fn), ranks.run(fn), ranks.run(fn, seed=7)
    assert first == again != other
    assert len({draw[0] for draw in first}) == 4


def test_cores_are_shared_out():
    (cores,) = ranks.run(torch.get_num_threads, world_size=1)
    assert set(ranks.run(torch.get_num_threads, world_size=8)) == {max(1, cores // 8)}


def test_ranks_see_todays_environment_and_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("COURSE_TEST", "yes")
    monkeypatch.chdir(tmp_path)
    found = ranks.run(lambda: (os.environ.get("COURSE_TEST"), os.getcwd()), world_size=1)
    assert found == [("yes", str(tmp_path))]
    monkeypatch.delenv("COURSE_TEST")
    assert ranks.run(lambda: os.environ.get("COURSE_TEST"), world_size=1) == [None]


def test_a_rank_finds_loaded_what_training_needs():
    needed = {"numpy", "torch", "torch._dynamo", "torch.distributed.fsdp"}
    assert ranks.run(lambda: needed <= sys.modules.keys(), world_size=1) == [True]


def test_nothing_stays_from_the_last_call():
    def fn():
        torch.course_test = getattr(torch, "course_test", 0) + 1
        return torch.course_test, os.getpid()

    (one, pid), (two, other) = ranks.run(fn, world_size=2)
    assert one == two == 1 and pid != other
    assert ranks.run(fn, world_size=1)[0][0] == 1


def test_prints_are_labelled_in_rank_order_and_on_stdout(capfd):
    def fn():
        rank = dist.get_rank()
        time.sleep(0.1 * (2 - rank))  # the last rank prints first
        print(f"one from {rank}")
        print("to stderr", file=sys.stderr)
        os.write(2, b"native\n")
        print("10%\r100%", end="")

    ranks.run(fn, world_size=2)
    out, err = capfd.readouterr()
    expected = ["one from {}", "to stderr", "native", "100%"]
    assert out.splitlines() == [f"rank {r} | {line.format(r)}" for r in (0, 1) for line in expected]
    assert err == ""


def test_endless_prints_are_cut(capsys):
    ranks.run(lambda: print("x" * 200_000), world_size=1)
    out = capsys.readouterr().out
    assert len(out) < 100_000
    assert out.splitlines()[-1].startswith("rank 0 | … ")


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
        while dist.get_rank() == 2:
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
    assert f"test_run.py, line {line}: dist.barrier()  # the line" in text


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
    assert "ranks.run was called inside a rank" in message(lambda: ranks.run(whoami), world_size=2)


def test_a_rank_may_start_workers_and_they_end_with_it():
    def fn():
        return subprocess.Popen(["sleep", "600"]).pid

    (pid,) = ranks.run(fn, world_size=1)
    assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


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


def test_calls_from_threads_do_not_mix():
    results, main = {}, sys.modules["__main__"]

    def call(name):
        results[name] = ranks.run(lambda: (name, dist.get_rank()), world_size=2)

    threads = [threading.Thread(target=call, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: [(name, 0), (name, 1)] for name in "ab"}
    assert sys.modules["__main__"] is main


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"fn": 3}, "fn is 3, not a function"),
        ({"world_size": 0}, "world_size is 0"),
        ({"world_size": 1024}, "from 1 to 64"),
        ({"world_size": 2.0}, "world_size is 2.0"),
        ({"args": [1]}, "args is a list, not a tuple"),
        ({"args": (threading.Lock(),)}, "cannot be sent to the ranks"),
        ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("nan")}, "timeout is nan"),
        ({"timeout": "3"}, "timeout is '3'"),
        ({"seed": None}, "seed is None"),
    ],
)
def test_bad_arguments_are_one_sentence(options, told):
    with pytest.raises(CourseError, match=told) as caught:
        ranks.run(**{"fn": whoami, **options})
    assert "\n" not in str(caught.value)
