"""How ranks and collectives are named in a message."""

from collections.abc import Iterable

from course_lib.ranks import stack
from course_lib.ranks.log import Entry

WORLD = "0"  # what torch calls the group of all ranks
DIRECTION = {
    "send": "to",
    "recv": "from",
    "broadcast": "from",
    "scatter": "from",
    "reduce": "to",
    "gather": "to",
}
MOST_CODE = 60  # characters of a line of code


def names(ranks: Iterable[int]) -> str:
    """ "rank 2", "ranks 0, 1 and 3", "ranks 0-3 and 7"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = []
    for run in runs:
        parts += [f"{run[0]}-{run[-1]}"] if len(run) > 2 else [str(rank) for rank in run]
    listed = " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)
    return ("rank " if listed.isdigit() else "ranks ") + listed


def call(entry: Entry) -> str:
    """Which collective: "all_reduce #3", "send #1 to rank 2", "barrier #1 of ranks 0 and 1"."""
    text = f"{entry.kind} #{entry.seq}"
    if entry.kind in DIRECTION:
        peer = "any rank" if entry.peer is None else f"rank {entry.peer}"
        text += f" {DIRECTION[entry.kind]} {peer}"
    if entry.tag:
        text += f" with tag {entry.tag}"
    if entry.group != WORLD:
        text += f" of {names(entry.members)}"
    return text


def size(entry: Entry) -> str:
    """ "8 float32"; nothing where nothing is moved."""
    return f"{entry.elements:,} {entry.dtype}" if entry.kind != "barrier" else ""


def payload(entry: Entry) -> str:
    """ "32 bytes"; nothing where nothing is moved."""
    if entry.kind == "barrier":
        return ""
    return f"{entry.payload:,} byte{'' if entry.payload == 1 else 's'}"


def sized(entry: Entry) -> str:
    """ "all_reduce #3 (32 bytes)"."""
    return call(entry) + (f" ({payload(entry)})" if payload(entry) else "")


def line(entry: Entry) -> str:
    """ "cell In[3], line 9: dist.all_reduce(x)"; nothing where there is no learner's line."""
    code = stack.source(entry.frame) if entry.frame else ""
    if len(code) > MOST_CODE:
        code = code[: MOST_CODE - 1] + "…"
    return entry.site + (f": {code}" if code else "")


def joined(*parts: str) -> str:
    return ", ".join(part for part in parts if part)
