"""How long a redraw of an explorer takes, beside the cost of an empty picture and of its numbers.

python benchmarks/explorer_redraw.py
"""

import statistics
import time
from functools import partial

from course_lib import explorers
from course_lib.figures.image import image_html, new_figure

RUNS = 40
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


empty = median_ms(empty_figure)
print(f"an empty matplotlib figure as SVG  {empty:6.1f} ms, medians of {RUNS}")
for name, explorer in EXPLORERS.items():
    redraw, compute = (median_ms(partial(action, explorer)) for action in (move, numbers_only))
    print(f"{name}: redraw (compute, draw, table)  {redraw:6.1f} ms, {redraw / empty:.2f} of it")
    print(f"{name}: compute alone                  {compute:6.1f} ms")
