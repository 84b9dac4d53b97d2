"""The course's colours stay apart in grey, and for the three kinds of colour blindness."""

import math
from itertools import combinations

import pytest

from course_lib.ledger import CATEGORIES, COLOURS, LABELS

# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
VISION = {
    "normal": [[1, 0, 0], [0, 1, 0], [0, 0, 1]],
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
    "tritanopia": [
        [1.255528, -0.076749, -0.178779],
        [-0.078411, 0.930809, 0.147602],
        [0.004733, 0.691367, 0.303900],
    ],
}


def linear(colour: str) -> list[float]:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]


def dot(a, b) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))


def lab(rgb: list[float]) -> tuple[float, float, float]:
    """CIE L*a*b* of linear RGB, D65."""
    to_xyz = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    white = (0.9505, 1.0, 1.089)
    xyz = [dot(row, rgb) / w for row, w in zip(to_xyz, white, strict=True)]
    x, y, z = [v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in xyz]
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def seen(colour: str, vision: str) -> tuple[float, float, float]:
    return lab([min(1, max(0, dot(row, linear(colour)))) for row in VISION[vision]])


def test_every_category_has_a_colour_and_a_label():
    assert CATEGORIES == tuple(LABELS) == tuple(COLOURS)
    assert CATEGORIES[:3] == ("parameters", "gradients", "optimizer_states")


def test_apart_in_grey():
    lightness = sorted(seen(colour, "normal")[0] for colour in COLOURS.values())
    assert min(b - a for a, b in zip(lightness, lightness[1:], strict=False)) > 8


@pytest.mark.parametrize("vision", VISION)
def test_apart_for_every_eye(vision):
    for a, b in combinations(COLOURS.values(), 2):
        assert math.dist(seen(a, vision), seen(b, vision)) > 15, (a, b)
