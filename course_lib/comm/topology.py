"""Two kinds of links: fast ones within a node, slower ones between nodes.

ring          one ring through all ranks, node after node, as NCCL lays it: several at once, so that
              together they use all ports of a node. The slower kind of link sets the pace.
tree          a tree over the nodes, and one within each node.
hierarchical  an all_reduce is a reduce_scatter within the node; then for each shard an all_reduce
              between the ranks that hold it, one on every node; then an all_gather within the node.
              In all, a rank moves what it moves in a ring, in far fewer steps.

Bandwidths are the vendors', from specs. Latencies are NCCL's own constants for its Simple protocol,
which large messages take; its protocols for small ones have less latency and less bandwidth. What
it takes to start a collective is not counted. Infinity Fabric is given NVLink's latency, and
Ethernet InfiniBand's: a TCP socket may have several times as much.
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from course_lib.comm.alpha_beta import AlphaBeta, height, work
from course_lib.errors import CourseError
from course_lib.specs import Cluster, Collective, gpu, link
from course_lib.specs.checking import known, whole
from course_lib.specs.tables import rows

LATENCIES = Path(__file__).parent / "data" / "nccl_latency.csv"
NVLINK, PCI, NETWORK = "hop nvlink (ring)", "hop pci", "hop network"
GB = 10**9


@dataclass(frozen=True)
class Topology:
    """Nodes of `gpus_per_node` GPUs.

    `within` joins a GPU to its neighbours; `between` is its share of the ports of its node.
    """

    gpus_per_node: int
    within: AlphaBeta
    between: AlphaBeta

    def __post_init__(self) -> None:
        whole("gpus_per_node", self.gpus_per_node)

    @classmethod
    def of(cls, cluster: Cluster, ports: int | None = None) -> "Topology":
        """The topology of a cluster whose nodes have `ports` ports of its link.

        By default there is one for each GPU, of Ethernet one for each node.
        """
        if ports is None:
            ports = 1 if cluster.link.startswith("ethernet") else cluster.gpus_per_node
        whole("ports", ports)
        port = link_cost(cluster.link)
        share = replace(port, beta=port.beta * cluster.gpus_per_node / ports)
        return cls(cluster.gpus_per_node, gpu_cost(cluster.gpu), share)

    def seconds(self, collective: Collective, algorithm: str = "ring") -> float:
        """Seconds that the collective takes; its ranks fill node after node.

        Raises CourseError where the algorithm does not carry the collective.
        """
        if collective.ranks <= self.gpus_per_node:
            return self.within.seconds(collective, algorithm)
        if collective.kind in ("send", "recv"):
            raise CourseError(
                f"A {collective.kind} takes one link: price it on topology.within or .between."
            )
        if algorithm == "hierarchical":
            phases = hierarchical(collective, self.gpus_per_node)
            return sum(getattr(self, where).seconds(phase) for where, phase in phases)
        return self._in_one(collective, algorithm)

    def _in_one(self, collective: Collective, algorithm: str) -> float:
        """One ring, or one tree, over all ranks: its steps within nodes and between them."""
        steps, nbytes = work(collective, algorithm)
        ranks, nodes = collective.ranks, -(-collective.ranks // self.gpus_per_node)
        if algorithm == "ring":
            # A chunk that goes once around passes every border between nodes.
            crossing = steps // (ranks - 1) * min(nodes, ranks - 1)
            inside = steps - crossing
        else:
            ways = steps // height(ranks)
            crossing, inside = ways * height(nodes), ways * height(self.gpus_per_node)
        latency = crossing * self.between.alpha + inside * self.within.alpha
        return latency + nbytes * max(self.within.beta, self.between.beta / self.gpus_per_node)


def hierarchical(collective: Collective, gpus_per_node: int) -> tuple[tuple[str, Collective], ...]:
    """The phases of an all_reduce, all_gather or reduce_scatter over full nodes.

    Each is ('within', its collective of the ranks of a node) or ('between', its collective of the
    ranks that hold the same shard, one on every node).
    """
    kinds = ("all_reduce", "all_gather", "reduce_scatter")
    known("hierarchical collective called", collective.kind, kinds)
    if collective.ranks % gpus_per_node:
        raise CourseError(
            f"{collective.ranks} ranks do not fill nodes of {gpus_per_node}, which a hierarchical "
            "collective needs: give another number of ranks, or take a ring."
        )
    shard = -(-collective.elements // gpus_per_node)
    nodes = collective.ranks // gpus_per_node
    between = ("between", replace(collective, elements=shard, ranks=nodes))
    scatter, gather = (
        ("within", replace(collective, kind=kind, ranks=gpus_per_node))
        for kind in ("reduce_scatter", "all_gather")
    )
    return {
        "all_reduce": (scatter, between, gather),
        "all_gather": (between, gather),
        "reduce_scatter": (scatter, between),
    }[collective.kind]


def gpu_cost(name: str) -> AlphaBeta:
    """What joins the GPUs called `name` within a node: NVLink, Infinity Fabric or PCIe."""
    device = gpu(name)
    hop = PCI if device.scale_up_kind.startswith("pcie") else NVLINK
    return AlphaBeta(_latency(hop), 1 / (device.scale_up_gb_s * GB))


def link_cost(name: str) -> AlphaBeta:
    """One port of the link called `name`."""
    hop = PCI if name.startswith("pcie") else NETWORK
    return AlphaBeta(_latency(hop), 1 / (link(name).gb_s * GB))


@cache
def _latency(hop: str) -> float:
    """Seconds."""
    microseconds = {row["item"]: row["Simple"] for row in rows(LATENCIES)}
    return float(microseconds[hop]) * 1e-6
