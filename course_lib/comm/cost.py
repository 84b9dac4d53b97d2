"""Prices in seconds, on an AlphaBeta (links of one kind) or a Topology (nodes)."""

from course_lib.comm.alpha_beta import AlphaBeta
from course_lib.comm.plan import Plan
from course_lib.comm.topology import Topology
from course_lib.errors import CourseError
from course_lib.specs import Collective

Network = AlphaBeta | Topology


def seconds(collective: Collective, network: Network, algorithm: str = "ring") -> float:
    """Seconds that the collective takes by 'ring', 'tree' or 'hierarchical'."""
    return network.seconds(collective, algorithm)


def step_seconds(plan: Plan, network: Network, algorithm: str = "ring") -> float:
    """Seconds that a step's collectives take one after another, with nothing overlapped."""
    total = 0.0
    for line in plan.lines:
        links = network.between if line.between_nodes else network
        round_of = sum(times * links.seconds(each, algorithm) for each, times in line.runs)
        total += line.rounds * round_of
    return total


def crossover(kind: str, ranks: int, network: Network, algorithm: str = "ring") -> float:
    """The size of a buffer, in bytes, whose alphas take as long as its bytes.

    A smaller one is all latency, a larger one all bandwidth. At this size, often called n_half,
    half of the bandwidth is reached. inf where bytes cost nothing.
    """
    large = ranks * 2**30  # bytes, in chunks that need no padding
    latency = network.seconds(Collective(kind, 0, 1, ranks), algorithm)
    transfer = network.seconds(Collective(kind, large, 1, ranks), algorithm) - latency
    return large * latency / transfer if transfer > 0 else float("inf")


def bus_bandwidth(collective: Collective, seconds: float) -> float:
    """Bytes a second that every link carried, had the collective been a ring.

    For an all_reduce of S bytes it is S / seconds · 2(N-1)/N: unlike S / seconds it can be compared
    with the speed of a link, whatever N is. Source: NVIDIA/nccl-tests, doc/PERFORMANCE.md.
    """
    if not seconds > 0:
        raise CourseError(f"seconds is {seconds!r}: give the time that was measured, above 0.")
    return collective.bytes_per_rank / seconds
