"""How long a redraw of an explorer takes, beside the cost of an empty picture and of its numbers.

The life-cycle viewer is not drawn anew: a step through 2,000 events moves the marks on its picture.

python benchmarks/explorer_redraw.py
"""

import statistics
import time
from functools import partial

from course_lib import explorers
from course_lib.figures.image import image_html, new_figure
from course_lib.sharded.fsdp_events import COMMUNICATION, Event

RUNS = 40
EVENTS, UNITS = 2000, 24
LIFE = {  # kind: milliseconds, and the state that it leads to
    "all_gather": (3, "gathering"),
    "wait": (2, "gathering"),
    "copy out": (1, "whole"),
    "forward": (9, "whole"),
    "backward": (18, "whole"),
    "reshard": (0, "sharded"),
    "copy in": (1, "sharded"),
    "reduce_scatter": (4, "sharded"),
}
FORWARD, BACKWARD = set(LIFE) - {"backward", "copy in", "reduce_scatter"}, set(LIFE) - {"forward"}
EXPLORERS = {
    "memory_ledger": explorers.memory_ledger(),
    "ladder": explorers.ladder(),
    "ladder of llama3-405b": explorers.ladder(model="llama3-405b"),
}


def median_ms(action) -> float:
    action(0)
    times = []
    for run in range(RUNS):
        start = time.perf_counter()
        action(run)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


def move(explorer, run: int) -> None:
    explorer.controls["ranks"].index = (run + 1) % 13


def numbers_only(explorer, run: int) -> None:
    values = {name: control.value for name, control in explorer.controls.items()}
    explorer._compute(**values | {"ranks": 2 ** (run % 13)})


def empty_figure(run: int) -> None:
    figure = new_figure()
    figure.add_subplot()
    image_html(figure, "nothing")


def life() -> list[Event]:
    """EVENTS events of steps through UNITS units, 8 MiB each."""
    events, now = [], 0.0
    forward = [(f"model.layers.{i}", FORWARD) for i in range(UNITS)]
    backward = [(unit, BACKWARD) for unit, _ in reversed(forward)]
    while len(events) < EVENTS:
        for unit, kinds in forward + backward:
            for kind in (kind for kind in LIFE if kind in kinds):
                milliseconds, state = LIFE[kind]
                end = now + 1e-3 * milliseconds
                held = 0 if kind == "reshard" else 2**23
                events.append(Event(kind, unit, 2**23, now, end, state, held))
                now = now if kind in COMMUNICATION else end
    return events[:EVENTS]


def step(viewer, run: int) -> None:
    viewer.controls["event"].value = 2 + run * (EVENTS - 2) // RUNS


empty = median_ms(empty_figure)
print(f"an empty matplotlib figure as SVG  {empty:6.1f} ms, medians of {RUNS}")
for name, explorer in EXPLORERS.items():
    redraw, compute = (median_ms(partial(action, explorer)) for action in (move, numbers_only))
    print(f"{name}: redraw (compute, draw, table)  {redraw:6.1f} ms, {redraw / empty:.2f} of it")
    print(f"{name}: compute alone                  {compute:6.1f} ms")
start = time.perf_counter()
viewer = explorers.life_cycle([life()])
first = time.perf_counter() - start
moved = median_ms(partial(step, viewer))
print(f"life_cycle of {EVENTS:,} events: a step  {moved:6.1f} ms, {moved / empty:.3f} of it")
print(f"life_cycle: drawn once            {1000 * first:6.1f} ms")
