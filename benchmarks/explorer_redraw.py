"""How long a redraw of the memory ledger explorer takes, beside the cost of its picture alone.

python benchmarks/explorer_redraw.py
"""

import statistics
import time

from course_lib import explorers
from course_lib.explorers import memory
from course_lib.figures.image import image_html, new_figure

RUNS = 40


def median_ms(action) -> float:
    action(0)
    times = []
    for run in range(RUNS):
        start = time.perf_counter()
        action(run)
        times.append(time.perf_counter() - start)
    return 1000 * statistics.median(times)


explorer = explorers.memory_ledger()
slider = explorer.controls["ranks"]


def move(run: int) -> None:
    slider.index = run % 13


def empty_figure(run: int) -> None:
    figure = new_figure()
    figure.add_subplot()
    image_html(figure, "nothing")


def numbers_only(run: int) -> None:
    memory.compute("llama3-8b", "zero-fp16", "adamw", "zero1", 2 ** (run % 13), "h100-sxm-80")


redraw, empty, compute = median_ms(move), median_ms(empty_figure), median_ms(numbers_only)
print(f"redraw (compute, draw, table)      {redraw:6.1f} ms, median of {RUNS}")
print(f"an empty matplotlib figure as SVG  {empty:6.1f} ms: redraw is {redraw / empty:.2f} of it")
print(f"compute alone                      {compute:6.1f} ms")
