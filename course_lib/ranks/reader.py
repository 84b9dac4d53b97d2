"""The file that a rank writes its collectives to, and how the parent reads it at any time.

Each line is one event, a JSON list:

    ["group", name, [ranks]]                                  a process group, at its first use
    ["enter", index, group, seq, kind, elements, dtype, itemsize, peer, tag,
        [file, line, function], t]
    ["wait", index, t]                                        the rank blocks until it is done
    ["done", index, t]                                        it is done
    ["resume", index, t]                                      the rank goes on before it is done
    ["threads"]                                               not all is done by one thread

`index` counts a rank's collectives, `seq` those of one group: where ranks are in step, the same
`seq` of a group is the same collective. Sends and recvs count their own `seq`, for each pair of
ranks, each direction and each tag, so that the same `seq` is the same message. A log ends after
MOST entries.
"""

import json
from pathlib import Path

from course_lib.ranks.log import Entry
from course_lib.ranks.protocol import Frame

MOST = 50_000  # entries of one rank that are logged
TAIL = 4096  # bytes


class Reader:
    """Reads what a rank has written so far; `read` again gives what has come since, too.

    After a `read`, `blocked` is the entry that the rank's main thread waits for at this moment,
    None where it is at work or where that cannot be known.
    """

    def __init__(self, rank: int, path: Path) -> None:
        self.rank, self._path, self._offset = rank, path, 0
        self._groups: dict[str, tuple[int, ...]] = {}
        self._frames: dict[tuple, Frame] = {}
        self._rows: list[dict] = []  # what will be an Entry, as far as it is known
        self._entries: list[Entry] = []
        self._waits: int | None = None  # the index of what the rank waits for
        self._threads = False

    @property
    def blocked(self) -> Entry | None:
        if self._waits is None or self._threads or self._entries[self._waits].end is not None:
            return None
        return self._entries[self._waits]

    @property
    def size(self) -> int:
        """Bytes written so far: while it grows, the rank communicates."""
        return self._path.stat().st_size if self._path.exists() else 0

    def latest(self) -> str:
        """ "all_reduce #31", from the last lines of the file alone; '' where that is not there."""
        if not self.size:
            return ""
        with self._path.open("rb") as file:
            file.seek(max(0, self.size - TAIL))
            lines = file.read().split(b"\n")[:-1]
        for line in reversed(lines):
            if line.startswith(b'["enter"'):
                _, _, _, seq, kind, *_ = json.loads(line)
                return f"{kind} #{seq}"
        return ""

    def read(self) -> tuple[Entry, ...]:
        """All entries so far. A line that is not whole yet is left for the next time."""
        changed = set()
        for event, *values in self._events():
            if event == "enter":
                self._enter(*values)
            elif event == "group":
                self._groups[values[0]] = tuple(values[1])
            elif event == "threads":
                self._threads = True
            else:
                changed.add(self._change(event, *values))
        for index in changed:
            if index < len(self._entries):
                self._entries[index] = Entry(**self._rows[index])
        self._entries += [Entry(**row) for row in self._rows[len(self._entries) :]]
        return tuple(self._entries)

    def _events(self) -> list[list]:
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text.rfind(b"\n") + 1
        self._offset += whole
        return json.loads(b"[" + b",".join(text[:whole].splitlines()) + b"]")

    def _change(self, event: str, index: int, time: float) -> int:
        if event == "wait":
            self._rows[index]["waiting"], self._waits = True, index
            return index
        if event == "done":
            self._rows[index]["end"] = time
        if self._waits == index:
            self._waits = None
        return index

    def _enter(self, index, group, seq, kind, elements, dtype, itemsize, peer, tag, line, time):
        if line and tuple(line) not in self._frames:
            self._frames[tuple(line)] = Frame(*line)
        self._rows.append(
            {
                "rank": self.rank,
                "kind": kind,
                "elements": elements,
                "dtype": dtype,
                "itemsize": itemsize,
                "group": group,
                "members": self._groups[group],
                "seq": seq,
                "peer": peer,
                "frame": self._frames[tuple(line)] if line else None,
                "start": time,
                "tag": tag,
            }
        )
