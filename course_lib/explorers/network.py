"""The network price explorer: what a ring costs on four networks, in latency and in bytes."""

from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import ipywidgets as widgets
from matplotlib.axes import Axes

from course_lib import comm, specs
from course_lib.explorers.base import Explorer
from course_lib.figures.cost_curves import SIZES, CostCurves, Curve
from course_lib.specs import Collective

NETWORKS = {  # every rank has one such link to its right neighbour, of its own
    "NVLink 4": comm.gpu_cost("h100-sxm-80"),
    "PCIe 5": comm.link_cost("pcie5-x16"),
    "InfiniBand NDR": comm.link_cost("ib-ndr"),
    "Ethernet 100G": comm.link_cost("ethernet-100g"),
}
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


@dataclass(frozen=True)
class Price:
    """One network's price of the collective, in seconds; `half` is in bytes of the buffer."""

    latency: float
    transfer: float
    half: float

    @property
    def seconds(self) -> float:
        return self.latency + self.transfer


@dataclass(frozen=True)
class Result:
    """The collective, its price on each network, and the chosen one of these."""

    collective: Collective
    prices: dict[str, Price]
    chosen: str


def compute(kind: str, size: int, ranks: int, network: str) -> Result:
    """The price of a ring collective on a buffer of `size` bytes, on each of NETWORKS."""
    collective = Collective(kind, size, 1, ranks)
    prices = {}
    for name, cost in NETWORKS.items():
        latency = cost.alpha * collective.steps
        transfer = comm.seconds(collective, cost) - latency
        prices[name] = Price(latency, transfer, comm.crossover(kind, ranks, cost))
    return Result(collective, prices, network)


def draw(axes: Axes) -> Callable[[Result], None]:
    """A curve for each network; the function that is returned shows a result in them."""
    axes.figure.subplots_adjust(left=0.1)
    curves = CostCurves(axes, tuple(NETWORKS))

    def update(result: Result) -> None:
        costs = {
            name: Curve(price.latency, price.latency / price.half)
            for name, price in result.prices.items()
        }
        curves.update(costs, result.collective.payload, result.chosen)

    return update


def words(result: Result) -> tuple[str, str]:
    """Alternative text, and the table: a row for each network."""
    price, what = result.prices[result.chosen], _what(result.collective)
    rules = "latency" if price.latency > price.transfer else "bandwidth"
    summary = (
        f"{what} over {result.chosen}: {duration(price.seconds)}, most of it {rules}. Below "
        f"{specs.human(price.half)} latency is more than half of the time."
    )
    times = ", ".join(f"{name} {duration(x.seconds)}" for name, x in result.prices.items())
    alt = (
        f"Time against size on logarithmic scales, a curve for each network: flat while latency "
        f"rules, then rising with the size. {what}: {times}."
    )
    return alt, f"<p><strong>{escape(summary)}</strong></p>{_table(result)}"


def duration(seconds: float) -> str:
    """`duration(0.0123)` is '12.3 ms': three digits and a unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} µs"


def _three_digits(number: float) -> str:
    digits = 2 if number < 10 else 1 if number < 100 else 0
    return f"{number:,.{digits}f}"


def _what(collective: Collective) -> str:
    size = specs.human(collective.payload, digits=0)
    return f"{collective.kind} of {size} on {collective.ranks} ranks"


def _table(result: Result) -> str:
    heads = ("alpha per step", "bandwidth", "latency", "bytes", "together", "latency's share", "n½")
    head = "".join(f"<th>{name}</th>" for name in heads)
    rows = "".join(
        _row(name, price, name == result.chosen) for name, price in result.prices.items()
    )
    steps = f"{result.collective.steps} steps, {result.collective.bytes_per_rank:,} bytes per rank"
    return (
        f"<table><thead><tr><th>{steps}</th>{head}</tr></thead><tbody>{rows}</tbody></table>"
        "<p><small>n½: the buffer at which latency and bytes cost the same. Each rank has a link "
        "to its neighbour that it shares with nobody.</small></p>"
    )


def _row(name: str, price: Price, chosen: bool) -> str:
    cost = NETWORKS[name]
    cells = (
        duration(cost.alpha),
        f"{cost.bandwidth / 1e9:g} GB/s",
        duration(price.latency),
        duration(price.transfer),
        duration(price.seconds),
        f"{100 * price.latency / price.seconds:.0f}%",
        specs.human(price.half),
    )
    label = f"<strong>{name}</strong> (chosen)" if chosen else name
    numbers = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><td style="text-align:left">{label}</td>{numbers}</tr>'


def network_price(
    kind: str = "all_reduce",
    size: int = 64 * 2**20,
    ranks: int = 8,
    network: str = "InfiniBand NDR",
) -> Explorer:
    """The explorer. `size`, the whole buffer in bytes, and `ranks` move over powers of two."""
    wide = {"style": {"description_width": "5em"}, "layout": {"width": "21em"}}
    powers = [2**exponent for exponent in range(1, 13)]
    sizes = [(specs.human(each, digits=0), each) for each in SIZES]
    controls = {
        "size": widgets.SelectionSlider(options=sizes, value=size, description="size", **wide),
        "ranks": widgets.SelectionSlider(options=powers, value=ranks, description="ranks", **wide),
        "kind": widgets.Dropdown(options=KINDS, value=kind, description="kind", **wide),
        "network": widgets.Dropdown(
            options=list(NETWORKS), value=network, description="network", **wide
        ),
    }
    return Explorer(controls, compute, draw, words)
