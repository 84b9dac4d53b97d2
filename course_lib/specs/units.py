"""Bytes for people. Inside, bytes are integers; on screen they are GiB, 2^30 bytes.

Papers and vendors often count in GB, 10^9 bytes, which is 7% less: `gb` is for them alone.
"""

BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def gib(nbytes: int, digits: int = 2) -> str:
    """`gib(2**34)` is '16.00 GiB'. For columns and comparisons: always the same unit."""
    return f"{nbytes / 2**30:,.{digits}f} GiB"


def gb(nbytes: int, digits: int = 2) -> str:
    """`gb(1_875_000_000)` is '1.88 GB': decimal, for figures quoted from a source that is."""
    return f"{nbytes / 10**9:,.{digits}f} GB"


def human(nbytes: int, digits: int = 2) -> str:
    """The binary unit that leaves a number below 1024: `human(1536)` is '1.50 KiB'."""
    size, power = abs(nbytes), 0
    # Rounding counts: 1023.999 KiB would print as 1,024.00 KiB, and is 1.00 MiB.
    while power < len(BINARY) - 1 and round(size / 1024**power, digits) >= 1024:
        power += 1
    if power == 0:
        return f"{nbytes} B"
    return f"{nbytes / 1024**power:,.{digits}f} {BINARY[power]}"
