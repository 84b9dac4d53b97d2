"""The two checks that every spec makes on what it is given: a known name, a whole number.

Each raises CourseError with one sentence: what was given, what was expected, what to do next.
"""

from collections.abc import Iterable

from course_lib.errors import CourseError


def known(what: str, name: object, names: Iterable[str]) -> None:
    """Raise unless `name` is one of `names`. The error shows the near ones, else all of them."""
    names = list(names)
    if isinstance(name, str) and name in names:
        return
    import difflib  # only an error needs it

    near = difflib.get_close_matches(str(name).lower(), names, n=3, cutoff=0.5)
    offer = f"did you mean {_choice(near)}?" if near else f"take one of {', '.join(names)}."
    raise CourseError(f"There is no {what} {name!r}: {offer}")


def whole(what: str, value: object, least: int = 1, most: int = 10**15) -> None:
    """Raise unless `value` is an int from `least` to `most`."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value <= most:
        return
    shown = f"{value:,}" if isinstance(value, int) and value > most else repr(value)
    bound = f"at most {most:,}" if shown != repr(value) else f"at least {least}"
    raise CourseError(f"{what} is {shown}: give a whole number, {bound}.")


def _choice(names: list[str]) -> str:
    """'a', 'b' or 'c'."""
    *first, last = (repr(name) for name in names)
    return f"{', '.join(first)} or {last}" if first else last
