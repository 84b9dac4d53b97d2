"""A job's communication, from arithmetic alone: which collectives, how many, how many bytes.

    step(model, recipe, strategy)            the collectives of one optimizer step: a Plan
    zero_redundancy(model, recipe, gpus)     the same for PyTorch's ZeroRedundancyOptimizer
    offloaded(model, recipe, strategy)       what crosses between a GPU and its host's memory
    seconds(collective, network)             what one costs: alpha, beta, ring or tree
    Topology.of(cluster)                     a network of nodes; AlphaBeta is one of links alike
    fit(samples)                             alpha and beta from measured times

A Plan draws itself. Its counts() and bytes_by_kind() are what a run's log should say, see
ranks.run(...).log: a receipt lays them side by side. `published` has figures of others.
"""

from course_lib.comm import published
from course_lib.comm.alpha_beta import AlphaBeta
from course_lib.comm.buckets import buckets
from course_lib.comm.cost import bus_bandwidth, crossover, seconds, step_seconds
from course_lib.comm.fit import fit
from course_lib.comm.offload import Offloaded, offloaded
from course_lib.comm.plan import Line, Plan
from course_lib.comm.step import step
from course_lib.comm.topology import Topology, gpu_cost, hierarchical, link_cost
from course_lib.comm.zero_redundancy import owners, zero_redundancy

__all__ = [
    "AlphaBeta",
    "Line",
    "Offloaded",
    "Plan",
    "Topology",
    "buckets",
    "bus_bandwidth",
    "crossover",
    "fit",
    "gpu_cost",
    "hierarchical",
    "link_cost",
    "offloaded",
    "owners",
    "published",
    "seconds",
    "step",
    "step_seconds",
    "zero_redundancy",
]
