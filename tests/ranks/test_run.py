"""ranks.run from this process: results, prints, and arguments that cannot be run."""

import io
import os
import random
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_lib import ranks
from course_lib.errors import CourseError


def whoami() -> tuple[int, int]:  # a function of an importable module travels by reference
    return dist.get_rank(), dist.get_world_size()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
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


def test_more_ranks_than_cores_work():
    def fn():
        one = torch.ones(1)
        dist.all_reduce(one)
        return float(one)

    assert ranks.run(fn, world_size=16) == [16.0] * 16


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


def test_without_a_seed_no_two_draws_are_the_same():
    def fn():
        return float(torch.rand(())), random.random(), float(np.random.rand())

    draws = sum(ranks.run(fn, world_size=2, seed=None) + ranks.run(fn, world_size=2, seed=None), ())
    assert len(set(draws)) == 12


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


class Seen(io.StringIO):
    """A stdout that makes a file when the first line comes."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path

    def write(self, text: str) -> int:
        self.path.touch()
        return super().write(text)


def test_prints_of_a_long_run_are_shown_while_it_goes_on(monkeypatch, tmp_path):
    def fn(path):
        print("early", flush=True)
        print("half a ", end="", flush=True)
        while not path.exists():
            time.sleep(0.01)
        print("line", end="")

    monkeypatch.setattr(sys, "stdout", Seen(tmp_path / "seen"))
    ranks.run(fn, world_size=2, args=(tmp_path / "seen",))
    assert sys.stdout.getvalue().splitlines() == [
        "rank 0 | early",
        "rank 1 | early",
        "rank 0 | half a line",
        "rank 1 | half a line",
    ]


def test_slow_ranks_are_not_taken_for_stuck():
    """Rank 0 computes for long with a receive under way, and the others wait for it."""

    def fn():
        rank, x = dist.get_rank(), torch.ones(4)
        receive = dist.irecv(x, 1) if rank == 0 else None
        if rank == 0:
            time.sleep(2)
            receive.wait()
        elif rank == 1:
            dist.send(2 * x, 0)
        dist.all_reduce(x)
        dist.barrier()
        return x.tolist()

    assert ranks.run(fn) == [[5.0] * 4] * 4


def test_endless_prints_are_cut(capsys):
    ranks.run(lambda: print("x" * 200_000), world_size=1)
    out = capsys.readouterr().out
    assert len(out) < 100_000
    assert out.splitlines()[-1].startswith("rank 0 | … ")


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
        ({"seed": 1.5}, "seed is 1.5"),
    ],
)
def test_bad_arguments_are_one_sentence(options, told):
    with pytest.raises(CourseError, match=told) as caught:
        ranks.run(**{"fn": whoami, **options})
    assert "\n" not in str(caught.value)


def test_a_rank_finds_what_torchrun_would_tell_it():
    def told():
        return [int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]

    assert ranks.run(told, world_size=2) == [[0, 0, 2], [1, 1, 2]]
