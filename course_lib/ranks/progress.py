"""One line that says how far a long run is, and is gone when the run is over.

    4 ranks, 12 s of at most 60 s; last: all_reduce #31 on ranks 0-3

In a terminal it is overwritten in place. In a notebook it is a display that is updated and, at
the end, emptied; and only where somebody looks on: a front end that could not ask its user
anything (nbclient, nbval, nbconvert) gets nothing, so nothing of it is ever in their notebooks.
Elsewhere there is none.
"""

import shutil
import sys
from collections.abc import Sequence

from course_lib.ranks import words


def line(world_size: int, seconds: float, timeout: float, latest: Sequence[str]) -> str:
    """`latest` is the last collective of each rank, '' where there is none yet."""
    text = f"{world_size} rank{'s' * (world_size > 1)}, {seconds:.0f} s of at most {timeout:g} s"
    sharing: dict[str, list[int]] = {}
    for rank, call in enumerate(latest):
        if call:
            sharing.setdefault(call, []).append(rank)
    where = [f"{call} on {words.names(ranks)}" for call, ranks in sharing.items()]
    return "; last: ".join([text, *([", ".join(where[:2])] if where else [])])


class Nowhere:
    """Shows nothing."""

    def show(self, text: str) -> None:
        """Put `text` in place of what was shown before."""

    def hide(self) -> None:
        """Make room for other output."""

    def close(self) -> None:
        """Leave nothing behind."""


class Terminal(Nowhere):
    """The last line of a terminal, on stderr."""

    _length = 0

    def show(self, text: str) -> None:
        self.hide()
        text = text[: shutil.get_terminal_size().columns - 1]
        sys.stderr.write(text)
        sys.stderr.flush()
        self._length = len(text)

    def hide(self) -> None:
        if self._length:
            sys.stderr.write("\r" + " " * self._length + "\r")
            sys.stderr.flush()
            self._length = 0

    def close(self) -> None:
        self.hide()


class Notebook(Nowhere):
    """A display of the cell that runs."""

    _handle = None

    def show(self, text: str) -> None:
        from IPython.display import display

        data = {"text/plain": text}
        if self._handle is None:
            self._handle = display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)

    def close(self) -> None:
        if self._handle is not None:
            self._handle.update({}, raw=True)


def place() -> Nowhere:
    """Where progress can be shown from here."""
    ipython = sys.modules.get("IPython")
    kernel = getattr(ipython.get_ipython(), "kernel", None) if ipython else None
    if kernel is not None:
        return Notebook() if getattr(kernel, "_allow_stdin", False) else Nowhere()
    return Terminal() if sys.stderr is not None and sys.stderr.isatty() else Nowhere()
