"""Overlap of backward and all-reduces: by hand, against a simulation in ticks, and its bounds."""

from random import Random

import pytest

from course_lib.comm.overlap import Gradient, Span, overlap
from course_lib.errors import CourseError

THREE = [Gradient(2.0, 10), Gradient(3.0, 10), Gradient(4.0, 10)]


def test_by_hand():
    """Each gradient its own bucket; an all-reduce takes 5 s, so the third waits for the second."""
    lanes = overlap(THREE, cap=10, cost=lambda nbytes: 5.0)
    assert lanes.compute == (Span(0, 2, 10), Span(2, 5, 10), Span(5, 9, 10))
    assert lanes.communication == (Span(2, 7, 10), Span(7, 12, 10), Span(12, 17, 10))
    assert (lanes.compute_end, lanes.end, lanes.exposed, lanes.busy) == (9, 17, 8, 15)


def test_one_bucket_hides_nothing():
    lanes = overlap(THREE, cap=1000, cost=lambda nbytes: nbytes / 10)
    assert lanes.communication == (Span(9, 12, 30),)
    assert lanes.exposed == lanes.busy == 3


def test_a_fast_network_exposes_the_last_bucket_alone():
    lanes = overlap(THREE, cap=20, cost=lambda nbytes: nbytes / 100)
    assert [span.nbytes for span in lanes.communication] == [20, 10]
    assert lanes.exposed == pytest.approx(0.1)


def test_nothing_to_send():
    assert overlap([], cap=1, cost=lambda nbytes: 1.0).exposed == 0


def test_a_cap_that_is_none_is_refused():
    with pytest.raises(CourseError, match="cap is 0"):
        overlap(THREE, cap=0, cost=lambda nbytes: 1.0)


def in_ticks(gradients, cap, cost):
    """The same backward, one unit of time after another: (compute's end, communication's end)."""
    left = [gradient.seconds for gradient in gradients]
    waiting, filled, sending, now, compute_end = [], 0, 0, 0, 0
    done = 0
    while done < len(gradients) or waiting or sending:
        if done < len(gradients):
            left[done] -= 1
        sending = max(0, sending - 1)
        now += 1
        while done < len(gradients) and left[done] <= 0:
            filled += gradients[done].nbytes
            done, compute_end = done + 1, now
            if filled >= cap or done == len(gradients):
                waiting.append(filled)
                filled = 0
        if not sending and waiting:
            sending = cost(waiting.pop(0))
    return compute_end, now


@pytest.mark.parametrize("seed", range(20))
def test_agrees_with_a_simulation_in_ticks(seed):
    rng = Random(seed)
    gradients = [Gradient(rng.randint(1, 9), rng.randint(1, 50)) for _ in range(rng.randint(1, 30))]
    cap, latency = rng.randint(1, 200), rng.randint(1, 6)
    lanes = overlap(gradients, cap, lambda nbytes: latency + nbytes // 8)
    assert (lanes.compute_end, lanes.end) == in_ticks(
        gradients, cap, lambda nbytes: latency + nbytes // 8
    )


@pytest.mark.parametrize("seed", range(5))
def test_exposed_time_lies_between_its_bounds(seed):
    rng = Random(seed)
    gradients = [Gradient(rng.random(), rng.randint(1, 99)) for _ in range(20)]
    lanes = overlap(gradients, 120, lambda nbytes: 0.1 + nbytes / 300)
    first_full = lanes.communication[0].start
    assert lanes.exposed >= lanes.communication[-1].seconds - 1e-12
    assert lanes.exposed >= lanes.busy - (lanes.compute_end - first_full) - 1e-12
    assert lanes.exposed <= lanes.busy + 1e-12
    assert sum(s.nbytes for s in lanes.communication) == sum(g.nbytes for g in gradients)
