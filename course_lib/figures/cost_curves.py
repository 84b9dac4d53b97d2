"""Time against size, a curve for each network: where latency rules, and where bandwidth does."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes

from course_lib.specs import human

LOOKS = ("#004D38", "o"), ("#0072B2", "s"), ("#CC6FA3", "^"), ("#E59400", "D")
SIZES = tuple(2**power for power in range(10, 35))  # bytes, 1 KiB to 16 GiB
TICKS = SIZES[:-1:4]  # a label below the last would be cut off
TIMES = {1e-5: "10 µs", 1e-4: "100 µs", 1e-3: "1 ms", 1e-2: "10 ms", 0.1: "100 ms"} | {
    10**power: f"{10**power:,} s" for power in range(5)
}


@dataclass(frozen=True)
class Curve:
    """What a network takes: `latency` seconds, whatever the size, and `per_byte` for each byte."""

    latency: float
    per_byte: float

    def seconds(self, size: float) -> float:
        return self.latency + size * self.per_byte

    @property
    def half(self) -> float:
        """Bytes at which latency and bytes cost the same."""
        return self.latency / self.per_byte


class CostCurves:
    """A curve for each name, on logarithmic scales, of which `update` shows other costs.

    A curve is dotted where latency is more than half of the time, and has a mark where it is just
    half. The chosen size is a vertical line, the chosen network's curve is thick.
    """

    def __init__(self, axes: Axes, names: Sequence[str]):
        self._axes = axes
        looks = dict(zip(names, LOOKS, strict=True))
        self._parts = {
            name: (
                axes.plot([], [], color=colour, linestyle=":")[0],
                axes.plot([], [], color=colour)[0],
                axes.plot([], [], color=colour, marker=marker, linestyle="", markersize=8)[0],
            )
            for name, (colour, marker) in looks.items()
        }
        self._size = axes.axvline(SIZES[0], color="black", linestyle="--", linewidth=1.0)
        self._size_text = axes.text(
            0, 1, "", va="top", fontsize=9, transform=axes.get_xaxis_transform()
        )
        axes.set(xscale="log", yscale="log", xlim=(SIZES[0], SIZES[-1]))
        axes.set_xticks(TICKS, [human(size, digits=0) for size in TICKS])
        axes.set_yticks(list(TIMES), TIMES.values())
        axes.minorticks_off()
        axes.set_xlabel("buffer; dotted: latency is more than half of the time")
        axes.spines[["top", "right"]].set_visible(False)
        for column, name in enumerate(names):
            self._legend_entry(column / len(names), name)

    def update(self, curves: Mapping[str, Curve], size: int, chosen: str) -> None:
        """Show the curves; `size` is in bytes, `chosen` is one of their names."""
        for name, curve in curves.items():
            below = [*(s for s in SIZES if s < curve.half), min(curve.half, SIZES[-1])]
            above = [max(curve.half, SIZES[0]), *(s for s in SIZES if s > curve.half)]
            for line, sizes in zip(self._parts[name], (below, above, [curve.half]), strict=True):
                line.set_data(sizes, [curve.seconds(s) for s in sizes])
                line.set_linewidth(3.2 if name == chosen else 1.5)
        self._size.set_xdata([size, size])
        right = size > SIZES[len(SIZES) * 3 // 4]
        self._size_text.set(
            x=size, text=f" {human(size, digits=0)} ", ha="right" if right else "left"
        )
        every = [curve.seconds(s) for curve in curves.values() for s in (SIZES[0], SIZES[-1])]
        self._axes.set_ylim(min(every) / 2, max(every) * 2)

    def _legend_entry(self, x: float, name: str) -> None:
        """The mark and the name; axes.legend would take a fifth of every redraw."""
        colour, marker = self._parts[name][2].get_color(), self._parts[name][2].get_marker()
        at = {"transform": self._axes.transAxes, "clip_on": False}
        self._axes.plot([x + 0.01], [1.1], color=colour, marker=marker, markersize=7, **at)
        self._axes.text(x + 0.03, 1.1, name, va="center", fontsize=9, transform=at["transform"])
