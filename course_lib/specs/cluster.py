"""The machines: GPUs and links, read from data/*.csv, which name their sources.

Memory. What vendors sell as 80 GB is 80 GiB (2^30 bytes) of memory, of which the driver keeps about
one per cent, and error correction on a GPU without HBM a few more. So `memory_bytes` reads the
vendor's figure as GiB: it is nominal, a little above what a job finds, and far nearer to it than 80
times 10^9 bytes would be. Then each process's CUDA context takes 0.5 to 0.9 GiB.

Bandwidths are decimal: 10^9 bytes a second.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from course_lib.specs.checking import known, whole
from course_lib.specs.tables import rows

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU. Rates are the vendor's, but `matmul_tflops`: measured, None if unknown.

    `scale_up_gb_s` is the bandwidth to its neighbours in the node, in each direction.
    """

    name: str
    memory_gb: int
    bf16_tflops: float
    hbm_tb_s: float
    scale_up_gb_s: float
    scale_up_kind: str
    matmul_tflops: float | None

    @property
    def memory_bytes(self) -> int:
        """Nominal memory: `memory_gb` read as GiB."""
        return self.memory_gb * 2**30


@dataclass(frozen=True)
class Link:
    """One kind of link between nodes, or between a GPU and its host; `gb_s` in each direction."""

    name: str
    gb_s: float


@dataclass(frozen=True)
class Cluster:
    """`gpus` GPUs of one kind, `gpus_per_node` to a node; `link` joins the nodes."""

    gpus: int = 1
    gpus_per_node: int = 8
    gpu: str = "h100-sxm-80"
    link: str = "ib-ndr"

    def __post_init__(self) -> None:
        whole("gpus", self.gpus)
        whole("gpus_per_node", self.gpus_per_node)
        known("GPU called", self.gpu, _gpus())
        known("link called", self.link, _links())

    @property
    def nodes(self) -> int:
        """Number of nodes; the last may not be full."""
        return -(-self.gpus // self.gpus_per_node)


def gpu(name: str) -> Gpu:
    """The GPU called `name`; CourseError, with near names, where there is none."""
    known("GPU called", name, _gpus())
    return _gpus()[name]


def gpus() -> tuple[str, ...]:
    """The names of the GPUs."""
    return tuple(_gpus())


def link(name: str) -> Link:
    """The link called `name`; CourseError, with near names, where there is none."""
    known("link called", name, _links())
    return _links()[name]


def links() -> tuple[str, ...]:
    """The names of the links."""
    return tuple(_links())


@cache
def _gpus() -> dict[str, Gpu]:
    return {
        row["gpu"]: Gpu(
            name=row["gpu"],
            memory_gb=int(row["memory_gb"]),
            bf16_tflops=float(row["bf16_dense_tflops"]),
            hbm_tb_s=float(row["hbm_tb_s"]),
            scale_up_gb_s=float(row["scale_up_gb_s_per_direction"]),
            scale_up_kind=row["scale_up_kind"],
            matmul_tflops=float(row["measured_matmul_tflops"] or 0) or None,
        )
        for row in rows(DATA / "hardware.csv")
    }


@cache
def _links() -> dict[str, Link]:
    return {
        row["link"]: Link(row["link"], float(row["gb_s_per_direction"]))
        for row in rows(DATA / "links.csv")
    }
