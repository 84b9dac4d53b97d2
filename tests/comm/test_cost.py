"""Prices: against a ring and a tree that are walked message by message, and published figures."""

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from course_lib import comm
from course_lib.comm import AlphaBeta, Topology
from course_lib.errors import CourseError
from course_lib.specs import Cluster, Collective, Recipe, Strategy, gpu, gpus, links, model

LINK = AlphaBeta(alpha=3e-6, beta=2e-9)
RANKS, ELEMENTS = st.integers(1, 9), st.integers(0, 50)
KINDS = ("all_reduce", "all_gather", "reduce_scatter")


def walk_ring(kind, elements, itemsize, ranks):
    """Send chunks around a ring for real: (rounds of messages, bytes that rank 0 sent), checked.

    Rank r begins with the number 1 + r in every place; an all_gather begins with its own chunk.
    """
    chunk = -(-elements // ranks)
    data = [[[1 + r] * chunk for _ in range(ranks)] for r in range(ranks)]
    steps = sent = 0
    if kind != "all_gather":
        for step in range(ranks - 1):
            messages = [data[r][(r - step - 1) % ranks] for r in range(ranks)]
            for r, message in enumerate(messages):
                right = (r + 1) % ranks
                mine = data[right][(r - step - 1) % ranks]
                data[right][(r - step - 1) % ranks] = [
                    a + b for a, b in zip(mine, message, strict=True)
                ]
            steps, sent = steps + 1, sent + chunk * itemsize
        total = ranks * (ranks + 1) // 2
        assert all(data[r][r] == [total] * chunk for r in range(ranks))
    if kind != "reduce_scatter":
        for step in range(ranks - 1):
            messages = [data[r][(r - step) % ranks] for r in range(ranks)]
            for r, message in enumerate(messages):
                data[(r + 1) % ranks][(r - step) % ranks] = message
            steps, sent = steps + 1, sent + chunk * itemsize
        assert all(each == data[0] for each in data)
    return steps, sent


@given(st.sampled_from(KINDS), ELEMENTS, st.sampled_from([2, 4]), RANKS)
def test_a_ring_costs_what_its_messages_cost(kind, elements, itemsize, ranks):
    steps, sent = walk_ring(kind, elements, itemsize, ranks)
    seconds = comm.seconds(Collective(kind, elements, itemsize, ranks), LINK)
    assert seconds == pytest.approx(steps * LINK.alpha + sent * LINK.beta)


@given(RANKS)
def test_a_tree_is_as_high_as_its_ranks_need(ranks):
    reached, steps = 1, 0
    while reached < ranks:  # everyone who has it passes it on
        reached, steps = 2 * reached, steps + 1
    latency = AlphaBeta(alpha=1, beta=0)
    assert comm.seconds(Collective("broadcast", 10, 4, ranks), latency, "tree") == steps
    assert comm.seconds(Collective("all_reduce", 10, 4, ranks), latency, "tree") == 2 * steps


def test_a_tree_moves_the_buffer_up_and_down():
    bandwidth = AlphaBeta(alpha=0, beta=1)
    collective = Collective("all_reduce", 10, 4, 8)
    assert comm.seconds(collective, bandwidth, "tree") == 80
    assert comm.seconds(collective, bandwidth, "ring") == 2 * 7 * 2 * 4


def test_small_buffers_go_by_tree_and_large_ones_by_ring():
    small, large = (Collective("all_reduce", elements, 4, 64) for elements in (1, 10**8))
    assert comm.seconds(small, LINK, "tree") < comm.seconds(small, LINK, "ring")
    assert comm.seconds(large, LINK, "ring") < comm.seconds(large, LINK, "tree")


def test_a_tree_gathers_nothing():
    with pytest.raises(CourseError, match="you gave it all_gather: take a ring"):
        comm.seconds(Collective("all_gather", 10, 4, 8), LINK, "tree")


def test_algorithms_are_known_by_name():
    with pytest.raises(CourseError, match="did you mean 'ring'"):
        comm.seconds(Collective("all_gather", 10, 4, 8), LINK, "rings")


@pytest.mark.parametrize("alpha, beta", [(-1e-6, 0), (0, float("nan")), (float("inf"), 0)])
def test_links_have_no_negative_cost(alpha, beta):
    with pytest.raises(CourseError, match="give seconds"):
        AlphaBeta(alpha, beta)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("network", [LINK, Topology(4, AlphaBeta(1e-6, 1e-12), LINK)])
@pytest.mark.parametrize("algorithm", ["ring", "hierarchical"])
def test_at_the_crossover_half_of_the_time_is_latency(kind, network, algorithm):
    size = comm.crossover(kind, 16, network, algorithm)
    latency = comm.seconds(Collective(kind, 0, 1, 16), network, algorithm)
    at_the_size = comm.seconds(Collective(kind, round(size), 1, 16), network, algorithm)
    assert at_the_size == pytest.approx(2 * latency, rel=0.01)


def test_the_crossover_of_a_ring_by_hand():
    """2(N-1) alpha against 2(N-1)/N · S · beta: S = N · alpha / beta."""
    assert comm.crossover("all_reduce", 8, LINK) == pytest.approx(8 * LINK.alpha / LINK.beta)


def test_where_bytes_cost_nothing_there_is_no_crossover():
    assert comm.crossover("all_reduce", 8, AlphaBeta(1e-6, 0)) == float("inf")
    assert comm.crossover("all_reduce", 1, LINK) == float("inf")


# Topologies: two kinds of links


@given(st.sampled_from(KINDS), st.integers(1, 4), st.integers(2, 4), st.integers(1, 30))
def test_a_hierarchy_moves_what_a_ring_moves(kind, gpus_per_node, nodes, chunk):
    ranks = gpus_per_node * nodes
    collective = Collective(kind, chunk * ranks, 2, ranks)
    phases = comm.hierarchical(collective, gpus_per_node)
    assert sum(phase.bytes_per_rank for _, phase in phases) == collective.bytes_per_rank
    assert sum(phase.steps for _, phase in phases) <= collective.steps


def test_the_three_phases_of_an_all_reduce():
    assert comm.hierarchical(Collective("all_reduce", 80, 2, 24), gpus_per_node=8) == (
        ("within", Collective("reduce_scatter", 80, 2, 8)),
        ("between", Collective("all_reduce", 10, 2, 3)),
        ("within", Collective("all_gather", 80, 2, 8)),
    )


def test_a_hierarchy_needs_full_nodes():
    with pytest.raises(CourseError, match="12 ranks do not fill nodes of 8"):
        comm.hierarchical(Collective("all_reduce", 80, 2, 12), gpus_per_node=8)


def test_a_broadcast_has_no_hierarchy():
    with pytest.raises(CourseError, match="no hierarchical collective called 'broadcast'"):
        comm.hierarchical(Collective("broadcast", 80, 2, 16), gpus_per_node=8)


@given(st.sampled_from(KINDS), st.integers(1, 4), st.integers(1, 4))
def test_where_all_links_are_alike_a_ring_over_nodes_is_a_ring(kind, gpus_per_node, nodes):
    """As the ports of a node are its GPUs' together, alike means: each has 1/gpus_per_node."""
    collective = Collective(kind, 1000, 4, gpus_per_node * nodes)
    share = AlphaBeta(LINK.alpha, LINK.beta * gpus_per_node)
    flat = Topology(gpus_per_node, LINK, share)
    assert comm.seconds(collective, flat) == pytest.approx(comm.seconds(collective, LINK))


def test_a_ring_crosses_every_border_once_around():
    count = Topology(4, AlphaBeta(1, 0), AlphaBeta(1000, 0))
    assert comm.seconds(Collective("all_gather", 1, 1, 12), count) == 3 * 1000 + 8
    assert comm.seconds(Collective("all_reduce", 1, 1, 12), count) == 2 * (3 * 1000 + 8)
    one_each = Topology(1, AlphaBeta(1, 0), AlphaBeta(1000, 0))
    assert comm.seconds(Collective("all_gather", 1, 1, 3), one_each) == 2 * 1000


def test_a_tree_over_nodes_is_one_over_the_nodes_and_one_in_each():
    count = Topology(8, AlphaBeta(1, 0), AlphaBeta(1000, 0))
    assert comm.seconds(Collective("all_reduce", 1, 1, 64), count, "tree") == 2 * (3 * 1000 + 3)


def test_within_a_node_nothing_crosses():
    topology = Topology(8, LINK, AlphaBeta(1, 1))
    for algorithm in ("ring", "hierarchical", "tree"):
        collective = Collective("all_reduce", 100, 4, 8)
        expected = comm.seconds(collective, LINK, algorithm)
        assert comm.seconds(collective, topology, algorithm) == expected


def test_a_send_is_priced_on_one_link():
    with pytest.raises(CourseError, match="topology.within or .between"):
        comm.seconds(Collective("send", 10, 4, 16), Topology(8, LINK, LINK))


def test_clusters_have_the_bandwidths_of_their_tables():
    topology = Topology.of(Cluster(64, 8, "h100-sxm-80", "ib-ndr"))
    assert topology.within.bandwidth == pytest.approx(450e9)
    assert topology.between.bandwidth == pytest.approx(50e9)  # a port for each GPU
    shared = Topology.of(Cluster(64, 8, "h100-sxm-80", "ethernet-100g"))
    assert shared.between.bandwidth == pytest.approx(12.5e9 / 8)  # a port for each node
    assert Topology.of(Cluster(64, 8), ports=4).between.bandwidth == pytest.approx(25e9)
    for name in gpus():
        assert comm.gpu_cost(name).bandwidth == pytest.approx(gpu(name).scale_up_gb_s * 1e9)


def test_latencies_are_nccls():
    assert comm.gpu_cost("h100-sxm-80").alpha == pytest.approx(3.4e-6)
    assert comm.gpu_cost("l40s-48").alpha == comm.link_cost("pcie4-x16").alpha
    assert comm.link_cost("pcie4-x16").alpha == pytest.approx(5.7e-6)
    assert comm.link_cost("ib-ndr").alpha == pytest.approx(14e-6)
    assert {comm.link_cost(name).alpha > 0 for name in links()} == {True}


@pytest.mark.parametrize("gpus_per_node, ports", [(0, None), (8, 0)])
def test_a_topology_has_gpus_and_ports(gpus_per_node, ports):
    with pytest.raises(CourseError, match="is 0"):
        Topology.of(Cluster(8, gpus_per_node), ports)


# Bus bandwidth


@pytest.mark.parametrize("kind", KINDS)
def test_the_bus_bandwidth_of_a_ring_without_latency_is_its_links(kind):
    collective = Collective(kind, 8 * 1000, 4, 8)
    seconds = comm.seconds(collective, AlphaBeta(0, 1 / 450e9))
    assert comm.bus_bandwidth(collective, seconds) == pytest.approx(450e9)


def test_bus_bandwidth_by_hand():
    """8 ranks all-reduce 1 GB in 10 ms: 100 GB/s, times 2 · 7/8."""
    collective = Collective("all_reduce", 10**9, 1, 8)
    assert comm.bus_bandwidth(collective, 0.01) == pytest.approx(175e9)
    with pytest.raises(CourseError, match="give the time that was measured"):
        comm.bus_bandwidth(collective, 0)


def measured_busbw():
    path = Path(__file__).parent / "allreduce_busbw.csv"
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    rows = csv.DictReader(lines)
    return {(row["system"], row["message"]): float(row["busbw_gb_s"]) for row in rows}


MEASURED = measured_busbw()
A100_NODES = Topology.of(Cluster(24, 8, "a100-sxm-40", "ib-hdr"), ports=4)
ON_LINKS = {  # system and message: network, ranks, bytes
    ("8xH200 one node (ring)", "large"): (comm.gpu_cost("h200-141"), 8, 2**34),
    ("8xB200 one node", "128 MiB"): (comm.gpu_cost("b200-180"), 8, 2**27),
    ("3 nodes x 8 A100-40 with 4x HDR", "large"): (A100_NODES, 24, 2**34),
}


@pytest.mark.parametrize("system", ON_LINKS, ids=" ".join)
def test_measured_rings_stay_below_their_links_and_above_half(system):
    network, ranks, nbytes = ON_LINKS[system]
    collective = Collective("all_reduce", nbytes // 2, 2, ranks)
    bound = comm.bus_bandwidth(collective, comm.seconds(collective, network)) / 1e9
    assert bound / 2 < MEASURED[system] < bound


def test_reduction_in_the_switch_exceeds_what_any_ring_could():
    """NVLS adds up in the switch, so a buffer crosses each link once and not twice."""
    link = comm.gpu_cost("h200-141").bandwidth / 1e9
    assert MEASURED["8xH200 one node (NVLS)", "large"] > link


def test_latency_leaves_a_small_message_little_of_the_bandwidth():
    """1 MiB on eight B200, with links of 900 GB/s: 36 were measured, and alpha-beta gives 37."""
    collective = Collective("all_reduce", 2**19, 2, 8)
    seconds = comm.seconds(collective, comm.gpu_cost("b200-180"))
    predicted = comm.bus_bandwidth(collective, seconds) / 1e9
    assert predicted == pytest.approx(MEASURED["8xB200 one node", "1 MiB"], rel=0.2)


# A step


@pytest.mark.parametrize("name", ["ddp", "zero2", "fsdp"])
def test_a_step_takes_what_its_collectives_take_one_after_another(name):
    recipe, strategy = Recipe(grad_accum=3), Strategy(name, 16)
    plan = comm.step(model("lab-25m"), recipe, strategy, bucket_bytes=10**6)
    topology = Topology.of(Cluster(16))
    by_hand = sum(
        comm.seconds(collective, topology)
        for line in plan.lines
        for collective, times in line.runs
        for _ in range(times * line.rounds)
    )
    assert comm.step_seconds(plan, topology) == pytest.approx(by_hand)


def test_hsdp_pays_the_network_for_its_replicas_alone():
    """The all_reduce has 2 ranks, which would fit into a node, but each is on another one."""
    plan = comm.step(model("lab-25m"), Recipe(), Strategy("hsdp", 16))
    free, link = AlphaBeta(0, 0), AlphaBeta(0, 1)
    assert comm.step_seconds(plan, Topology(8, free, link)) == plan.bytes_by_kind()["all_reduce"]
    inside = plan.bytes_per_rank - plan.bytes_by_kind()["all_reduce"]
    assert comm.step_seconds(plan, Topology(8, link, free)) == inside
    assert comm.step_seconds(plan, link) == plan.bytes_per_rank
