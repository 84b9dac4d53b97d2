import pytest

from course_lib.specs import gb, gib, human


@pytest.mark.parametrize(
    "nbytes, expected",
    [
        (0, "0 B"),
        (1, "1 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (2**20 - 1, "1.00 MiB"),
        (24_771_150 * 4, "94.49 MiB"),
        (2**34, "16.00 GiB"),
        (2**60, "1,024.00 PiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_human(nbytes, expected):
    assert human(nbytes) == expected


def test_gib_keeps_its_unit_and_gb_is_decimal():
    assert gib(2**40) == "1,024.00 GiB"
    assert gib(2**20, digits=3) == "0.001 GiB"
    assert gb(1_875_000_000) == "1.88 GB"
