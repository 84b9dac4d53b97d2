"""03-price and 03-busbw: from a data sheet's figure to seconds, and from seconds to a figure."""

from course_lib import comm, specs
from course_lib.checks.comparison import close
from course_lib.checks.exercise import Case, Exercise, Misconception
from grading.exercises.ring_bytes import KINDS, ONE_PART, POINTS, bytes_per_rank, rounds

# --- 03-price: one step on four networks --------------------------------------------------------


def gradient_seconds(parameters, ranks, figure, bits, both_directions):
    bandwidth = figure * 1e9  # bytes a second, in each direction
    if bits:
        bandwidth /= 8
    if both_directions:
        bandwidth /= 2
    gradients = 2 * parameters  # bf16
    return 2 * (ranks - 1) / ranks * gradients / bandwidth


def _gradient_seconds_in_chunks(parameters, ranks, figure, bits, both_directions):
    chunk = -(-parameters // ranks) * 2
    bytes_a_second = figure * 1e9 * (1 / 8 if bits else 1) * (1 / 2 if both_directions else 1)
    return sum(chunk / bytes_a_second for _ in range(2 * (ranks - 1)))


def _price(change):
    def answer(parameters, ranks, figure, bits, both):
        right = gradient_seconds(parameters, ranks, figure, bits, both)
        return right * change(ranks, bits, both)

    return answer


NETWORKS = {  # as a data sheet gives them: figure, counts bits, adds up both directions
    "NVLink": (900.0, False, True),
    "PCIe": (126.0, False, True),
    "InfiniBand": (400.0, True, False),
    "Ethernet": (100.0, True, False),
}


def _price_cases(parameters: int, ranks: int, faster: float = 1.0) -> list[Case]:
    return [
        Case(f"{name}, {parameters / 1e9:g}B on {ranks} ranks", (parameters, ranks, x, *how), name)
        for name, (figure, *how) in NETWORKS.items()
        for x in [figure * faster]
    ]


PRICE = Exercise(
    id="03-price",
    title="One step on four networks",
    task="Return the seconds in which DDP's bf16 gradients are all-reduced on such a network.",
    points=dict.fromkeys(NETWORKS, 1),
    reference=gradient_seconds,
    alternatives=(_gradient_seconds_in_chunks,),
    cases=(*_price_cases(10**9, 2), *_price_cases(7 * 10**9, 64)),
    fresh=lambda rng: _price_cases(
        rng.randrange(1, 80) * 10**9, rng.randrange(3, 300), rng.choice((0.5, 2.0))
    ),
    compare=close(1e-6),
    library=(comm.seconds, comm.step_seconds, specs.Collective.bytes_per_rank),
    nudge="First bytes a second in one direction; then 2(N-1)/N times the gradients' bytes.",
    misconceptions=(
        Misconception(
            "bits taken for bytes",
            _price(lambda n, bits, both: 1 / 8 if bits else 1),
            "You took Gbit/s for GB/s: a byte has 8 bits, so a 400 Gbit/s port moves 50 GB/s.",
        ),
        Misconception(
            "multiplied by eight",
            _price(lambda n, bits, both: 1 / 64 if bits else 1),
            "You multiplied by 8 where you should divide: a byte is 8 bits, so a port moves fewer "
            "bytes than bits.",
        ),
        Misconception(
            "both directions taken for one",
            _price(lambda n, bits, both: 1 / 2 if both else 1),
            "You used a figure that adds up both directions. A ring sends in one direction while "
            "it receives in the other, so half of it carries what a rank sends.",
            "NVLink's 900 GB/s are 450 out and 450 in.",
        ),
        Misconception(
            "the figure as it is",
            _price(lambda n, bits, both: (1 / 8 if bits else 1) * (1 / 2 if both else 1)),
            "You took every figure as GB/s in one direction. Some are bits, and some add up both "
            "directions: read `bits` and `both_directions`.",
        ),
        Misconception(
            "fp32 gradients",
            _price(lambda n, bits, both: 2),
            "You are high by a factor of two. The gradients are bf16, 2 bytes each, and an "
            "all_reduce has two rounds, not four.",
        ),
        Misconception(
            "one round",
            _price(lambda n, bits, both: 1 / 2),
            "You are low by a factor of two: a gradient has 2 bytes, and an all_reduce two rounds.",
        ),
        Misconception(
            "no ring factor",
            _price(lambda n, bits, both: n / (n - 1)),
            "You left out (N-1)/N: in each round a rank sends N - 1 of the N chunks.",
        ),
        Misconception(
            "payload once",
            _price(lambda n, bits, both: n / (n - 1) / 2),
            "You divided the gradients' bytes by the bandwidth. An all_reduce moves 2(N-1)/N "
            "times that.",
        ),
        Misconception(
            "GiB a second",
            _price(lambda n, bits, both: 1 / 1.073741824),
            "You took GB/s for GiB/s. Speeds of links are decimal.",
        ),
        Misconception(
            "all ranks together",
            _price(lambda n, bits, both: n),
            "You added up the bytes of all ranks, and let one link carry them. Each rank has its "
            "own link, and all work at once.",
        ),
        Misconception(
            "model states",
            _price(lambda n, bits, both: 8),
            "You sent all 16 bytes of model states. Only gradients travel: 2 bytes.",
        ),
        Misconception(
            "milliseconds",
            _price(lambda n, bits, both: 1e3),
            "You return milliseconds; asked is seconds.",
        ),
    ),
)

# --- 03-busbw: bus bandwidth --------------------------------------------------------------------


def bus_bandwidth(kind, payload, ranks, seconds):
    factor = (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks
    return factor * payload / seconds / 1e9


def _bus_bandwidth_by_bytes(kind, payload, ranks, seconds):
    return bytes_per_rank(kind, payload, 1, ranks) / (seconds * 1e9)


def _bandwidth(change):
    """A wrong factor, from the rounds and the ranks."""

    def answer(kind, payload, ranks, seconds):
        return change(rounds(kind), ranks) * payload / seconds / 1e9

    return answer


def _bandwidth_cases(payload: int, ranks: int, seconds: float) -> list[Case]:
    name = f"{payload:,} bytes in {seconds:g} s, {ranks} ranks"
    return [Case(name, (kind, payload, ranks, seconds), kind) for kind in KINDS]


BUSBW = Exercise(
    id="03-busbw",
    title="Bus bandwidth",
    task="Return the bus bandwidth in GB/s: what each link would have carried in a ring.",
    points=POINTS,
    reference=bus_bandwidth,
    alternatives=(_bus_bandwidth_by_bytes,),
    cases=(*_bandwidth_cases(8 * 10**9, 8, 0.04), *_bandwidth_cases(4000, 4, 0.001)),
    fresh=lambda rng: _bandwidth_cases(
        6 * rng.randrange(10**6, 10**9), 6, rng.randrange(1, 900) / 1000
    ),
    compare=close(1e-6),
    library=(comm.bus_bandwidth,),
    nudge="What a rank sends in a ring, (N-1)/N of the payload or twice that, over the time.",
    misconceptions=(
        Misconception(
            "algorithm bandwidth",
            _bandwidth(lambda rounds, n: 1),
            "That is the algorithm bandwidth, payload over time. A link carries more or less than "
            "the payload: multiply by what a ring sends of it.",
        ),
        Misconception(
            "one round for all",
            _bandwidth(lambda rounds, n: (n - 1) / n),
            "You took one round for an all_reduce too; it sends 2(N-1)/N of the payload.",
        ),
        Misconception(
            "two rounds for all",
            _bandwidth(lambda rounds, n: 2 * (n - 1) / n),
            "You took two rounds for every kind; a reduce_scatter or an all_gather is one.",
        ),
        Misconception(
            "no (N-1)/N",
            _bandwidth(lambda rounds, n: rounds),
            "You left out (N-1)/N: a rank does not send the chunk that it keeps.",
        ),
        Misconception(
            "factor upside down",
            _bandwidth(lambda rounds, n: n / (n - 1) / rounds),
            "You divided by the factor: that turns bus bandwidth back into algorithm bandwidth.",
        ),
        Misconception(
            "whole buffers in every step",
            _bandwidth(lambda rounds, n: rounds * (n - 1)),
            "You forgot to divide by N: a step moves one chunk, an N-th of the payload.",
        ),
        Misconception(
            "an all_gather's payload taken for one rank's part",
            lambda kind, payload, n, seconds: bus_bandwidth(
                kind, payload * (n if kind == "all_gather" else 1), n, seconds
            ),
            ONE_PART,
        ),
        Misconception(
            "GiB a second",
            _bandwidth(lambda rounds, n: rounds * (n - 1) / n / 1.073741824),
            "You give GiB/s. Bandwidths are decimal: 10^9 bytes a second.",
        ),
        Misconception(
            "bytes a second",
            _bandwidth(lambda rounds, n: rounds * (n - 1) / n * 1e9),
            "You give bytes a second; asked is GB/s.",
        ),
        Misconception(
            "gigabits a second",
            _bandwidth(lambda rounds, n: rounds * (n - 1) / n * 8),
            "You give Gbit/s; asked is GB/s, in bytes.",
        ),
    ),
)
