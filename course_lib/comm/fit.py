"""Alpha and beta from measurements.

Each sample is a collective and the seconds that it took. We look for the alpha and beta, neither
below 0, with the least sum of squared *relative* errors

    ( (steps · alpha + bytes · beta) / seconds  -  1 )²

Absolute errors would be those of the largest sizes alone, since a small buffer takes a thousandth
of their time, and alpha, which only the small ones show, would be lost among them.
"""

from collections.abc import Iterable

from course_lib.comm.alpha_beta import AlphaBeta, work
from course_lib.errors import CourseError
from course_lib.specs import Collective


def fit(samples: Iterable[tuple[Collective, float]], algorithm: str = "ring") -> AlphaBeta:
    """The alpha and beta that explain the samples best: pairs of a collective and its seconds.

    Raises CourseError where the samples cannot tell alpha from beta: they must have at least two
    different sizes of at least two ranks.
    """
    samples = list(samples)
    points = []  # (steps, bytes) / seconds: alpha and beta times these should make 1
    for collective, seconds in samples:
        if not seconds > 0:
            raise CourseError(f"A sample took {seconds!r} seconds: give a measured time, above 0.")
        steps, nbytes = work(collective, algorithm)
        points.append((steps / seconds, nbytes / seconds))
    # The normal equations, a 2 x 2 system: [ss sb; sb bb] [alpha; beta] = [s; b].
    s, b = (sum(point[i] for point in points) for i in (0, 1))
    ss, sb, bb = (sum(x[i] * x[j] for x in points) for i, j in ((0, 0), (0, 1), (1, 1)))
    determinant = ss * bb - sb * sb
    if determinant <= 1e-9 * ss * bb:
        raise CourseError(
            f"These {len(samples)} samples cannot tell alpha from beta: give at least two sizes, "
            "far apart, of two ranks or more."
        )
    alpha, beta = (s * bb - b * sb) / determinant, (b * ss - s * sb) / determinant
    if alpha < 0:
        alpha, beta = 0.0, b / bb
    elif beta < 0:
        alpha, beta = s / ss, 0.0
    return AlphaBeta(alpha, beta)
