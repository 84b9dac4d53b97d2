"""03-exchange: one step around the ring.

What comes of a receive into the tensor that is being sent is a matter of luck; so a rank that does
that reports it in place of the numbers. Ranks that all wait in recv raise another type than those
that all wait in send, so that each gets its own sentence. With two ranks left and right are the
same: there, ranks that all wait in recv have not sent, whichever neighbour they wait for.
"""

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from course_lib import ranks
from course_lib.checks.comparison import close
from course_lib.checks.exercise import Answer, Case, Exercise, Misconception
from course_lib.sharded import ring
from grading.exercises.on_a_ring import (
    DEADLOCK,
    blocking,
    everyones,
    in_one_batch,
    me,
    numbers,
    on_a_ring,
    ring_case,
    to_the_left,
)

OVERWRITTEN = "received into the tensor that it sent"


class AllReceiving(ranks.RankDesync):
    """Every rank waits in its first recv."""


class _Calls(TorchDispatchMode):
    """Lists, in order, the operators that send from or receive into `tensor`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        super().__init__()
        self._tensor, self.made = tensor, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name().removeprefix("c10d::")
        if name in ("send", "recv_") and args[0][0].data_ptr() == self._tensor.data_ptr():
            self.made.append(name)
        return func(*args, **(kwargs or {}))


def exchanged(answer: Answer, case: Case) -> dict[str, object]:
    """As `on_a_ring`; see the module's docstring."""

    def on_this_rank(tensor):
        with _Calls(tensor) as calls:
            returned = answer(tensor)
        return OVERWRITTEN if calls.made == ["send", "recv_"] else returned

    try:
        told = on_a_ring(on_this_rank, case)
    except ranks.RankDesync as error:
        _, *rows = str(error).splitlines()  # a line for each rank
        if all(" recv #1 from " in row and "waiting for" in row for row in rows):
            raise AllReceiving(str(error), error.outcomes) from error
        raise
    return {
        rank: {OVERWRITTEN: True} if report.get("returned") == OVERWRITTEN else report
        for rank, report in told.items()
    }


def _parity(tensor):
    """Blocking calls, but even ranks send first and odd ones receive first."""
    rank, n = me()
    incoming = torch.empty_like(tensor)
    calls = [(dist.send, tensor, (rank + 1) % n), (dist.recv, incoming, (rank - 1) % n)]
    for call, *args in calls if rank % 2 == 0 else calls[::-1]:
        call(*args)
    return incoming


def _receive_not_waited(tensor):
    rank, n = me()
    incoming = torch.empty_like(tensor)
    dist.irecv(incoming, (rank - 1) % n)
    dist.isend(tensor, (rank + 1) % n).wait()
    return incoming


def _nothing_waited(tensor):
    rank, n = me()
    incoming = torch.empty_like(tensor)
    dist.isend(tensor, (rank + 1) % n)
    dist.irecv(incoming, (rank - 1) % n)
    return incoming


def _all_receive_first(tensor):
    rank, n = me()
    incoming = torch.empty_like(tensor)
    dist.recv(incoming, (rank - 1) % n)
    dist.send(tensor, (rank + 1) % n)
    return incoming


def _from_the_right(tensor):
    rank, n = me()
    incoming = torch.empty_like(tensor)
    sending = dist.isend(tensor, (rank + 1) % n)
    dist.recv(incoming, (rank + 1) % n)
    sending.wait()
    return incoming


def _into_its_own(tensor):
    rank, n = me()
    sending = dist.isend(tensor, (rank + 1) % n)
    dist.recv(tensor, (rank - 1) % n)
    sending.wait()
    return tensor


def _what_recv_returns(tensor):
    ring.exchange(tensor)
    return (dist.get_rank() - 1) % dist.get_world_size()


EXCHANGE = Exercise(
    id="03-exchange",
    title="One step around the ring",
    task="Send `tensor` to the rank on your right and return what the rank on your left sent.",
    points={"all": 2},
    reference=ring.exchange,
    library=(ring.exchange,),
    alternatives=(in_one_batch, _parity),
    cases=(
        ring_case([[0.0, 1.0], [10.0, 11.0]]),
        ring_case([[0.0, 1.0], [10.0, 11.0], [20.0, 21.0]]),
    ),
    fresh=lambda rng: [ring_case(numbers(rng, 4, 2))],
    run=exchanged,
    compare=close(1e-5, 1e-5),
    nudge="isend to (rank + 1) % N, recv from (rank - 1) % N into an empty tensor, then wait for "
    "the send: keep the request that isend returns, as a send that is dropped may never arrive.",
    misconceptions=(
        Misconception(
            "no communication",
            lambda tensor: tensor,
            "Each rank returns its own tensor: nothing was sent.",
            "Two calls are needed on each rank: one that sends and one that receives.",
        ),
        Misconception(
            "to the left",
            to_the_left,
            "You send the wrong way round: the right neighbour of rank r is r + 1, and what you "
            "receive comes from r - 1.",
        ),
        Misconception(
            "into its own tensor",
            _into_its_own,
            "You receive into the tensor that you are still sending. Make an empty one.",
            "`isend` comes back before the numbers have left, so `recv` may overwrite them, and "
            "which ones arrive is a matter of luck. torch.empty_like(tensor) makes another one.",
        ),
        Misconception(
            "what recv returns",
            _what_recv_returns,
            "You return what `dist.recv` returns, which is the sender's rank. What was sent is in "
            "the tensor that you gave it.",
        ),
        Misconception(
            "receive not waited for",
            _receive_not_waited,
            "You return before the data is there: `irecv` comes back at once with a request, and "
            "the tensor is filled when the request's `wait()` returns.",
            "Either keep the request and call wait() on it, or use `recv`, which waits.",
        ),
        Misconception(
            "nothing waited for",
            _nothing_waited,
            "You wait neither for the send nor for the receive: both calls only start something.",
            "Keep both requests and call wait() on each before you return.",
        ),
        Misconception(
            "all-gather",
            lambda tensor: everyones(tensor)[dist.get_rank() - 1],
            "The result is right, but you called all_gather: every rank got every tensor, N - 1 "
            "times the bytes that one step needs.",
            "`dist.isend` and `dist.recv` talk to one rank only.",
        ),
        Misconception(
            "adds its own",
            lambda tensor: tensor + ring.exchange(tensor),
            "You added your own tensor to what came from the left. Return it as it came; adding "
            "is the next exercise.",
        ),
        Misconception(
            "all send first",
            blocking,
            "The ranks wait for each other, and none can go on. Either all of them send before "
            "anyone receives, or not all take part.",
            f"{DEADLOCK} Start the send with `isend`, receive, then wait for the send.",
        ),
        Misconception(
            "all receive first",
            _all_receive_first,
            "All ranks wait in recv, and nobody has sent yet.",
            "`recv` returns only when something has come. Start the send with `isend`, receive, "
            "then wait for the send.",
        ),
        Misconception(
            "from the right",
            _from_the_right,
            "You wait for the rank that you send to. What you receive comes from the left, from "
            "(rank - 1) % N; with two ranks that is the same one.",
        ),
    ),
)
