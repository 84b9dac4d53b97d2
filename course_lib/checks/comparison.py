"""Comparisons of plain data. Each gives None when equal, else where and how the two differ."""

import math
from collections.abc import Callable

import numpy as np

Compare = Callable[[object, object], str | None]


def exactly(expected: object, got: object) -> str | None:
    """Integers, strings and their containers must be equal; 24.0 is accepted for 24."""
    return _compare(expected, got, rtol=0.0, atol=0.0, where="")


def close(rtol: float = 1e-6, atol: float = 0.0) -> Compare:
    """Numbers must agree within a tolerance: relative to the expected one, or absolute."""

    def compare(expected: object, got: object) -> str | None:
        return _compare(expected, got, rtol=rtol, atol=atol, where="")

    return compare


def _compare(expected, got, *, rtol, atol, where) -> str | None:
    if isinstance(expected, list) and isinstance(got, list):
        if len(expected) != len(got):
            return f"{where or 'your answer'} has {len(got)} items, not {len(expected)}"
        pairs = [
            (_inside(where, f"item {i}"), e, g)
            for i, (e, g) in enumerate(zip(expected, got, strict=True))
        ]
    elif isinstance(expected, dict) and isinstance(got, dict):
        if expected.keys() != got.keys():
            return f"{where or 'your answer'} has the keys {sorted(got)}, not {sorted(expected)}"
        pairs = [(_inside(where, key), value, got[key]) for key, value in expected.items()]
    else:
        return _compare_leaves(expected, got, rtol=rtol, atol=atol, where=where)
    for name, e, g in pairs:
        if difference := _compare(e, g, rtol=rtol, atol=atol, where=name):
            return difference
    return None


def _inside(where: str, name: str) -> str:
    return f"{where}, {name}" if where else name


def _compare_leaves(expected, got, *, rtol, atol, where) -> str | None:
    name = where or "your answer"
    if got is None and expected is not None:
        return f"{name} is None, as where there is no `return`"
    if isinstance(expected, np.ndarray) or isinstance(got, np.ndarray):
        return _compare_arrays(_array(expected), _array(got), rtol, atol, name)
    if _is_number(expected) and _is_number(got):
        equal = expected == got or _near(expected, got, rtol, atol)
    else:
        equal = type(expected) is type(got) and expected == got
    return None if equal else f"{name} is {show(got)}, not {show(expected)}"


def _compare_arrays(expected, got, rtol, atol, name) -> str | None:
    if expected.shape != got.shape:
        return f"{name} has shape {got.shape}, not {expected.shape}"
    if got.dtype.kind not in "biuf" or not np.allclose(got, expected, rtol=rtol, atol=atol):
        if got.size > 20:
            return f"{name} has the right shape but other values"
        return f"{name} is {show(got.tolist())}, not {show(expected.tolist())}"
    return None


def _near(expected: float, got: float, rtol: float, atol: float) -> bool:
    try:
        return bool(rtol or atol) and math.isclose(expected, got, rel_tol=rtol, abs_tol=atol)
    except OverflowError:  # an int beyond any float
        return False


def _array(value: object) -> np.ndarray:
    try:
        return np.asarray(value)
    except ValueError:  # lists of unequal lengths
        return np.asarray(repr(value))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def show(value: object) -> str:
    """A value as a learner reads it: thousands separated, long things cut."""
    if _is_number(value):
        if isinstance(value, int):
            bits = value.bit_length()
            return f"{value:,}" if bits < 200 else f"a number of {bits:,} bits"
        return f"{value:,.6g}" if abs(value) < 1e6 else f"{value:,.1f}"
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "…"
