"""A verdict in words: one sentence that names the ranks and their calls, then a line for each.

rank 2 called reduce_scatter #4 while ranks 0, 1 and 3 called all_gather #4
  rank 2            reduce_scatter #4  16 float32, 64 bytes  cell In[12], line 7: dist.…
  ranks 0, 1 and 3  all_gather #4      16 float32, 64 bytes  cell In[12], line 9: dist.…
"""

from collections.abc import Mapping, Sequence

from course_lib.ranks import words
from course_lib.ranks.desync import Absent, Call, Deadlock, Mismatch, Verdict
from course_lib.ranks.log import PAIRED, Entry

MOST_ROWS = 8
RENDEZVOUS = (
    "  a send ends once its recv is called: let some ranks receive first, or send with isend"
)


def tell(verdict: Verdict, last: Mapping[int, Entry]) -> str:
    """The text for an error. `last` is the last collective of each rank that called one."""
    match verdict:
        case Mismatch(call):
            return "\n".join([_mismatch(call), *_rows(call, last)])
        case Absent(call, ranks):
            return "\n".join([_absent(call, ranks), *_rows(call, last, ranks)])
        case Deadlock():
            return "\n".join(_deadlock(verdict))


def _mismatch(call: Call) -> str:
    few, *others = sides = call.sides
    kinds = {words.call(entry) for side in sides for entry in side}
    if len(kinds) == 1 or few[0].kind in PAIRED:  # the same call, of another size
        tell = lambda entry: f"{words.call(entry)} with {words.size(entry)}"  # noqa: E731
    else:
        tell = words.call
    if len(sides) > 2:
        return f"the ranks do not agree on collective #{few[0].seq}"
    first, second = (f"{_names(side)} called {tell(side[0])}" for side in (few, others[0]))
    return f"{first} while {second}"


def _absent(call: Call, ranks: tuple[int, ...]) -> str:
    entry = call.entries[0]
    own = words.call(entry)
    if entry.kind == "send":
        own = f"recv #{entry.seq} from rank {entry.rank}"
    elif entry.kind == "recv":
        own = f"send #{entry.seq} to rank {entry.rank}"
    waiting = [e for e in call.entries if e.waiting and e.end is None]
    others = f"{_names(waiting)} wait{'' if len(waiting) > 1 else 's'} for"
    if not waiting:
        others = f"{_names(call.entries)} called"
    return f"{words.names(ranks)} returned without calling {own}, which {others}"


def _deadlock(verdict: Deadlock) -> list[str]:
    rows = [
        (entry.rank, (*_call(entry), f"waiting for {words.names(missing)}", words.line(entry)))
        for entry, missing in zip(verdict.entries, verdict.missing, strict=True)
    ]
    head = f"{_names(verdict.entries)} wait for each other, and none of them can go on"
    sends = all(entry.kind == "send" for entry in verdict.entries)
    return [head, *_table(rows), *([RENDEZVOUS] if sends else [])]


def _rows(call: Call, last: Mapping[int, Entry], returned: Sequence[int] = ()) -> list[str]:
    """A line for each party, with its entry or else the last one it made before."""
    entered = {entry.rank: entry for entry in call.entries}
    rows = []
    for rank in sorted(call.parties):
        entry = entered.get(rank) or last.get(rank)
        if entry is None:
            rows.append((rank, ("called no collective", "", "")))
            continue
        own, size = _call(entry)
        if rank not in entered:
            own = ("returned after " if rank in returned else "after ") + own
        rows.append((rank, (own, size, words.line(entry))))
    return _table(rows)


def _call(entry: Entry) -> tuple[str, str]:
    return words.call(entry), words.joined(words.size(entry), words.payload(entry))


def _table(rows: list[tuple[int, tuple[str, ...]]]) -> list[str]:
    """Ranks with the same cells share a line; columns are aligned."""
    sharing: dict[tuple[str, ...], list[int]] = {}
    for rank, cells in rows:
        sharing.setdefault(cells, []).append(rank)
    table = [(words.names(ranks), *cells) for cells, ranks in sharing.items()][:MOST_ROWS]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  "
        + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width)
        for row in table
    ]
    more = len(sharing) - len(table)
    return [line.rstrip() for line in lines] + ([f"  … and {more} more"] if more else [])


def _names(entries: Sequence[Entry]) -> str:
    return words.names([entry.rank for entry in entries])
