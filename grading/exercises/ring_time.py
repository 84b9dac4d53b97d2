"""03-time and 03-latency: alpha and beta of a ring collective."""

from random import Random

from course_lib import comm
from course_lib.checks.comparison import close
from course_lib.checks.exercise import Case, Exercise, Misconception
from grading.exercises.ring_bytes import KINDS, POINTS, rounds

# --- 03-time: alpha and beta --------------------------------------------------------------------


def ring_seconds(kind, payload, ranks, alpha_us, gb_s):
    steps = (2 if kind == "all_reduce" else 1) * (ranks - 1)
    chunk = payload / ranks
    return steps * (alpha_us * 1e-6 + chunk / (gb_s * 1e9))


def _seconds_in_two_terms(kind, payload, ranks, alpha_us, gb_s):
    steps = rounds(kind) * (ranks - 1)
    latency = steps * alpha_us / 1e6
    return latency + steps / ranks * payload / gb_s / 1e9


def _seconds(change):
    """A wrong time, from steps, the payload, ranks, alpha in seconds and bytes a second."""

    def answer(kind, payload, ranks, alpha_us, gb_s):
        return change(rounds(kind) * (ranks - 1), payload, ranks, alpha_us * 1e-6, gb_s * 1e9)

    return answer


def _seconds_cases(payload: int, ranks: int, alpha_us: float, gb_s: float) -> list[Case]:
    name = f"{payload:,} bytes, {ranks} ranks"
    return [Case(name, (kind, payload, ranks, alpha_us, gb_s), kind) for kind in KINDS]


def _fresh_seconds(rng: Random) -> list[Case]:
    ranks = rng.randrange(3, 65)
    payload = ranks * rng.randrange(10**4, 10**6)
    return _seconds_cases(payload, ranks, rng.randrange(2, 30), rng.randrange(5, 500))


TIME = Exercise(
    id="03-time",
    title="The time of a ring",
    task="Return the seconds that a ring collective takes: steps · (alpha + chunk / bandwidth).",
    points=POINTS,
    reference=ring_seconds,
    alternatives=(_seconds_in_two_terms,),
    cases=(*_seconds_cases(4_000_000, 4, 10.0, 50.0), *_seconds_cases(8_000, 8, 3.0, 450.0)),
    fresh=_fresh_seconds,
    compare=close(1e-6),
    library=(comm.seconds, comm.AlphaBeta.seconds),
    nudge="Each of the steps takes alpha seconds and then sends one chunk.",
    misconceptions=(
        Misconception(
            "one alpha",
            _seconds(lambda steps, size, n, a, bw: a + steps * size / n / bw),
            "You pay alpha once. Each step waits for the one before it, so each pays its own.",
            "That is why latency grows with the number of ranks.",
        ),
        Misconception(
            "no alpha",
            _seconds(lambda steps, size, n, a, bw: steps * size / n / bw),
            "You left out alpha: a small message takes time too.",
        ),
        Misconception(
            "the whole buffer in every step",
            _seconds(lambda steps, size, n, a, bw: steps * (a + size / bw)),
            "You send the whole buffer in every step. A step moves one chunk, an N-th of it.",
        ),
        Misconception(
            "the whole buffer once",
            _seconds(lambda steps, size, n, a, bw: steps * a + size / bw),
            "You count the whole buffer once. A ring moves a chunk in every step: (N-1)/N of the "
            "buffer in one round, twice that in an all_reduce.",
        ),
        Misconception(
            "one round for all",
            lambda kind, *rest: ring_seconds("all_gather", *rest),
            "You count one round for an all_reduce too. It makes 2(N-1) steps.",
        ),
        Misconception(
            "two rounds for all",
            lambda kind, *rest: ring_seconds("all_reduce", *rest),
            "You count two rounds for every kind; a reduce_scatter or an all_gather is one.",
        ),
        Misconception(
            "N steps in each round",
            _seconds(lambda steps, size, n, a, bw: steps * n / (n - 1) * (a + size / n / bw)),
            "You count N steps in each round; there are N - 1.",
        ),
        Misconception(
            "microseconds taken for seconds",
            _seconds(lambda steps, size, n, a, bw: steps * (a * 1e6 + size / n / bw)),
            "You took alpha for seconds. It is in microseconds, millionths.",
        ),
        Misconception(
            "microseconds taken for milliseconds",
            _seconds(lambda steps, size, n, a, bw: steps * (a * 1e3 + size / n / bw)),
            "Your alpha is a thousand times too long: a microsecond is 1e-6 s, not 1e-3.",
        ),
        Misconception(
            "GiB a second",
            _seconds(lambda steps, size, n, a, bw: steps * (a + size / n / (bw * 1.073741824))),
            "You took GB/s for GiB/s. Speeds of links are decimal: 10^9 bytes a second.",
        ),
        Misconception(
            "gigabits",
            _seconds(lambda steps, size, n, a, bw: steps * (a + 8 * size / n / bw)),
            "You took GB/s for Gbit/s: these are bytes already.",
        ),
        Misconception(
            "microseconds",
            _seconds(lambda steps, size, n, a, bw: steps * (a + size / n / bw) * 1e6),
            "You return microseconds; asked is seconds.",
        ),
    ),
)

# --- 03-latency: where latency and bandwidth cost the same --------------------------------------


def n_half(ranks, alpha_us, gb_s):
    return ranks * (alpha_us * 1e-6) * (gb_s * 1e9)


def _n_half_by_chunk(ranks, alpha_us, gb_s):
    chunk = 1000 * alpha_us * gb_s  # bytes that cross in alpha
    return chunk * ranks


def _n_half(factor):
    return lambda ranks, *link: n_half(ranks, *link) * factor(ranks)


def _link_case(ranks: int, alpha_us: float, gb_s: float) -> Case:
    return Case(f"{ranks} ranks, {alpha_us:g} µs, {gb_s:g} GB/s", (ranks, alpha_us, gb_s))


LATENCY = Exercise(
    id="03-latency",
    title="Where latency and bandwidth cost the same",
    task="Return the size of a buffer, in bytes, at which half of the time is latency.",
    points={"all": 2},
    reference=n_half,
    alternatives=(_n_half_by_chunk,),
    cases=(_link_case(4, 10.0, 50.0), _link_case(8, 3.0, 450.0)),
    fresh=lambda rng: [
        _link_case(rng.randrange(3, 513), rng.randrange(2, 30), rng.randrange(5, 500)) for _ in "ab"
    ],
    compare=close(1e-6),
    library=(comm.crossover,),
    nudge="In one step alpha = chunk / bandwidth. Solve for the chunk; the buffer is N of them.",
    misconceptions=(
        Misconception(
            "the chunk",
            _n_half(lambda n: 1 / n),
            "That is the chunk: alpha times bandwidth. The buffer holds N chunks.",
        ),
        Misconception(
            "N - 1 chunks",
            _n_half(lambda n: (n - 1) / n),
            "You took N - 1 chunks, the number of steps. Steps cancel, as both costs are paid in "
            "each; a buffer is N chunks.",
        ),
        Misconception(
            "all the steps of an all-reduce",
            _n_half(lambda n: 2 * (n - 1) / n),
            "You took 2(N-1) chunks. Steps cancel, as both costs are paid in each of them; a "
            "buffer is N chunks.",
        ),
        Misconception(
            "a whole buffer in each step",
            _n_half(lambda n: 1 / n**2),
            "You divided by N where you should multiply: a chunk is alpha times bandwidth, a "
            "buffer N chunks.",
        ),
        Misconception(
            "twice",
            _n_half(lambda n: 2),
            "You are high by a factor of two. At n½ the bytes take as long as the alphas, so that "
            "the whole time is twice the latency; do not double the buffer, too.",
        ),
        Misconception(
            "half",
            _n_half(lambda n: 1 / 2),
            "You are low by a factor of two: half of the *time* is latency. The bytes take as long "
            "as all the alphas, not half as long.",
        ),
        Misconception(
            "units left as they are",
            _n_half(lambda n: 1e-3),
            "You multiplied microseconds by GB/s as they are. 1 µs · 1 GB/s is 1000 bytes.",
        ),
        Misconception(
            "microseconds taken for seconds",
            _n_half(lambda n: 1e6),
            "You took alpha for seconds; it is in microseconds.",
        ),
        Misconception(
            "gigabits",
            _n_half(lambda n: 1 / 8),
            "You divided by 8. GB/s are bytes already.",
        ),
        Misconception(
            "seconds",
            lambda n, alpha_us, gb_s: (n - 1) * alpha_us * 1e-6,
            "That is a time, the latency of one round. Asked is the size of a buffer.",
        ),
    ),
)
