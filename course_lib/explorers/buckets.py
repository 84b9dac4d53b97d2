"""The bucket explorer: how much of DDP's communication hides behind backward."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from html import escape
from itertools import groupby, takewhile
from operator import itemgetter

import ipywidgets as widgets
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, NullLocator

from course_lib import specs
from course_lib.comm import Topology
from course_lib.comm.buckets import in_use_order
from course_lib.comm.overlap import Gradient, Lanes, Span, overlap
from course_lib.explorers.base import Explorer
from course_lib.figures import lanes as figure
from course_lib.ledger import COLOURS
from course_lib.specs import human

MODELS = ("gpt2", "gpt2-xl", "phi-2", "llama2-7b")
CAPS = tuple(mib * 2**20 for mib in (1, 4, 16, 25, 64, 256, 1024, 4096, 16384))
TOKENS = tuple(2**exponent for exponent in range(10, 17))
GPU, GPUS_PER_NODE = "h100-sxm-80", 8
ALGORITHMS = ("ring", "tree", "hierarchical")
GRADIENT_BYTES = specs.DTYPE_BYTES["fp32"]  # as under autocast

COMPUTE, COMMUNICATION = "backward", "all_reduce"
COLOUR = {COMPUTE: "#8C8C8C", COMMUNICATION: COLOURS["gradients"]}  # grey: no memory at all


@dataclass(frozen=True)
class Result:
    """The lanes for each bucket size, the chosen size, and backward's spans, block by block."""

    by_cap: dict[int, Lanes]
    cap: int
    blocks: tuple[Span, ...]
    network: str

    @property
    def lanes(self) -> Lanes:
        return self.by_cap[self.cap]


def compute(model: str, ranks: int, link: str, tokens: int, bucket: int) -> Result:
    """One backward of `tokens` tokens on each rank. `bucket`: the cap in bytes, one of CAPS."""
    layers, gradients = zip(*_backward(specs.model(model), tokens), strict=True)
    topology = Topology.of(specs.Cluster(ranks, GPUS_PER_NODE, GPU, link))
    cost = partial(_all_reduce, topology, ranks)
    by_cap = {cap: overlap(gradients, cap, cost) for cap in CAPS}
    network = link if ranks > GPUS_PER_NODE else specs.gpu(GPU).scale_up_kind
    return Result(by_cap, bucket, tuple(_blocks(layers, by_cap[bucket].compute)), network)


def _backward(spec: specs.ModelSpec, tokens: int) -> list[tuple[int | None, Gradient]]:
    """The gradients as backward finishes them, each with its block's index.

    Backward multiplies twice with each weight matrix: 4 FLOPs for each weight and token. An
    embedding is looked up, not multiplied; where it is the head too, that product comes first, and
    the gradient is complete last all the same.
    """
    per_weight = 4 * tokens / (specs.gpu(GPU).matmul_tflops * 1e12)  # seconds
    tensors = in_use_order(spec)
    embeddings = tuple(takewhile(lambda tensor: tensor.layer is None, tensors))
    gradients = []
    for tensor in reversed(tensors):
        multiplied = len(tensor.shape) > 1 and tensor not in embeddings
        seconds = per_weight * tensor.numel if multiplied else 0.0
        gradients.append((tensor.layer, Gradient(seconds, GRADIENT_BYTES * tensor.numel)))
    head = per_weight * spec.vocab_size * spec.hidden_size
    return [(None, Gradient(head, 0)), *gradients] if spec.tied_embeddings else gradients


def _all_reduce(topology: Topology, ranks: int, nbytes: int) -> float:
    """Seconds by the algorithm that is fastest for the size, as NCCL chooses."""
    bucket = specs.Collective("all_reduce", nbytes // GRADIENT_BYTES, GRADIENT_BYTES, ranks)
    return min(topology.seconds(bucket, algorithm) for algorithm in ALGORITHMS)


def _blocks(layers: Iterable[int | None], spans: Iterable[Span]) -> Iterable[Span]:
    """The spans of each block, as one."""
    for _, group in groupby(zip(layers, spans, strict=True), key=itemgetter(0)):
        together = [span for _, span in group]
        nbytes = sum(span.nbytes for span in together)
        yield Span(together[0].start, together[-1].end, nbytes)


def draw(axes: Axes) -> Callable[[Result], None]:
    """Two lanes above, exposed time over bucket size below; what is returned shows a result."""
    picture = axes.figure
    axes.remove()
    picture.set_size_inches(7.4, 4.4)
    picture.subplots_adjust(left=0.12, bottom=0.17, top=0.97, hspace=0.55)
    upper, lower = picture.subplots(2, 1, height_ratios=(1, 1.1))
    upper.set_xlabel("milliseconds since backward began")
    lanes = figure.Lanes(upper, COLOUR)
    (curve,) = lower.plot(CAPS, [0] * len(CAPS), "o-", color="black", linewidth=1.2, markersize=4)
    (chosen,) = lower.plot(
        [0], [0], "o", markersize=11, markeredgecolor="black", color=COLOURS["gradients"]
    )
    lower.set_xscale("log", base=2)
    lower.set_xticks(CAPS, [human(cap, digits=0).replace(" ", "\n") for cap in CAPS], fontsize=8)
    lower.xaxis.set_minor_locator(NullLocator())
    lower.yaxis.set_major_locator(MaxNLocator(4))
    lower.set_xlabel("buckets of")
    lower.set_ylabel("exposed, ms")
    lower.spines[["top", "right"]].set_visible(False)

    def update(result: Result) -> None:
        now = result.lanes
        spans = {COMPUTE: result.blocks, COMMUNICATION: now.communication}
        lanes.update(
            {name: [(1e3 * s.start, 1e3 * s.end) for s in of] for name, of in spans.items()},
            marked=(1e3 * now.compute_end, 1e3 * now.end),
            lane=COMMUNICATION,
            words=f"exposed {_ms(now.exposed)}",
        )
        exposed = [1e3 * result.by_cap[cap].exposed for cap in CAPS]
        curve.set_ydata(exposed)
        chosen.set_data([result.cap], [1e3 * now.exposed])
        lower.set_ylim(0, 1.15 * max(*exposed, 1e-6))

    return update


def words(result: Result) -> tuple[str, str]:
    """Alternative text, and the table: a row for each bucket size."""
    now = result.lanes
    sent = len(now.communication)
    summary = (
        f"Backward computes for {_ms(now.compute_end)}; {sent} all-reduce{'s' * (sent != 1)} over "
        f"{result.network} take {_ms(now.busy)}, of which {_ms(now.exposed)} are exposed."
    )
    best = min(CAPS, key=lambda cap: result.by_cap[cap].exposed)
    alt = (
        f"Two lanes over time, backward and all_reduce, and a curve of exposed time over bucket "
        f"size, lowest at {human(best, digits=0)}. {summary}"
    )
    heads = ("buckets of", "all-reduces", "all-reduce, ms", "exposed, ms", "backward in all, ms")
    head = "".join(f"<th>{name}</th>" for name in heads)
    body = "".join(_row(result, cap) for cap in CAPS)
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    return alt, f"<p><strong>{escape(summary)}</strong></p>{table}"


def _row(result: Result, cap: int) -> str:
    lanes, size = result.by_cap[cap], human(cap, digits=0)
    label = f"<strong>{size}</strong> (chosen)" if cap == result.cap else size
    times = (lanes.busy, lanes.exposed, lanes.end)
    cells = "".join(f"<td>{1e3 * seconds:,.1f}</td>" for seconds in times)
    return (
        f'<tr><td style="text-align:left">{label}</td><td>{len(lanes.communication):,}</td>'
        f"{cells}</tr>"
    )


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.1f} ms"


def bucket_overlap(
    model: str = "gpt2",
    ranks: int = 64,
    link: str = "ib-ndr",
    tokens: int = 8192,
    bucket: int = 25 * 2**20,
) -> Explorer:
    """The explorer, starting from the given job: `tokens` on each rank, `bucket` in bytes.

    Each rank is an H100, eight to a node; `link` joins the nodes. An all-reduce takes what it
    takes by the fastest of ring, tree and hierarchy.
    """
    wide = {"style": {"description_width": "5em"}, "layout": {"width": "21em"}}
    powers = [2**exponent for exponent in range(1, 11)]
    sizes = [(human(cap, digits=0), cap) for cap in CAPS]
    slider, dropdown = widgets.SelectionSlider, widgets.Dropdown
    controls = {
        "bucket": slider(options=sizes, value=bucket, description="bucket", **wide),
        "ranks": slider(options=powers, value=ranks, description="ranks", **wide),
        "tokens": slider(options=TOKENS, value=tokens, description="tokens", **wide),
        "link": dropdown(options=specs.links(), value=link, description="link", **wide),
        "model": dropdown(options=MODELS, value=model, description="model", **wide),
    }
    return Explorer(controls, compute, draw, words)
