"""Lesson 09, 09-offload: what a step pays to have the model states on the host."""

from course_lib.checks.comparison import close
from course_lib.checks.exercise import Case, Exercise, Misconception, call_for_a_line

PARTS = {"to_device": 1, "to_host": 1, "update": 1}


def bill(root, blocks, ranks, micro_batches, pcie, memory):
    gathered, trained = (root + 2 * blocks) / ranks, (root + blocks) / ranks
    return {
        "to_device": micro_batches * 4 * gathered / pcie,
        "to_host": micro_batches * 4 * trained / pcie,
        "update": 28 * trained / memory,
    }


def _step_by_step(root, blocks, ranks, micro_batches, pcie, memory):
    forward = backward = to_host = 0.0
    for _ in range(micro_batches):
        forward += (root + blocks) // ranks * 4
        backward += blocks // ranks * 4
        to_host += (root + blocks) // ranks * 4
    update = (root + blocks) // ranks * 4 * (4 + 3)  # reads four, writes three
    return {
        "to_device": (forward + backward) / pcie,
        "to_host": to_host / pcie,
        "update": update / memory,
    }


def _bill(
    down=lambda r, b: r + 2 * b,
    up=lambda r, b: r + b,
    update=lambda r, b, g: 28 * (r + b),
    itemsize=4,
    share=lambda elements, n: elements / n,
    rounds=lambda g: g,
    slow=lambda pcie, memory: memory,
):
    """The reference with one thing wrong; r and b are elements of this rank's shards."""

    def answer(root, blocks, ranks, micro_batches, pcie, memory):
        r, b = share(root, ranks), share(blocks, ranks)
        g = rounds(micro_batches)
        return {
            "to_device": g * itemsize * down(r, b) / pcie,
            "to_host": g * itemsize * up(r, b) / pcie,
            "update": update(r, b, micro_batches) / slow(pcie, memory),
        }

    return answer


def _cases(
    root: int, blocks: int, ranks: int, micro_batches: int, pcie: float, memory: float
) -> list[Case]:
    each = f"{micro_batches} micro-batch" + "es" * (micro_batches > 1)
    name = f"root {root:,}, blocks {blocks:,}, {ranks} ranks, {each}"
    args = (root, blocks, ranks, micro_batches, pcie, memory)
    return [Case(name, args, part) for part in PARTS]


OFFLOAD = Exercise(
    id="09-offload",
    title="The bill for offloading",
    task="Return the seconds that a step spends on PCIe, each way, and on the host's update.",
    points=PARTS,
    reference=bill,
    alternatives=(_step_by_step,),
    compare=close(1e-9),
    cases=(
        *_cases(400, 1600, 4, 1, 100.0, 200.0),
        *_cases(400, 1600, 4, 3, 100.0, 200.0),
    ),
    fresh=lambda rng: _cases(
        64 * rng.randrange(10**5, 10**6),
        64 * rng.randrange(10**6, 10**8),
        rng.choice((8, 16, 64)),
        rng.randrange(2, 9),
        31e9,
        rng.choice((40e9, 80e9)),
    ),
    run=call_for_a_line,
    nudge="Count elements of this rank's shards. To the device: each unit's, once for each of its "
    "gathers, and the root has one. To the host: each gradient, once. Both in every micro-batch, 4 "
    "bytes each. Then 28 bytes for each element, once a step, at the memory's pace.",
    misconceptions=(
        Misconception(
            "whole units",
            _bill(share=lambda elements, n: elements),
            "You move whole units. A rank has its shard on the host, and that is what crosses; the "
            "rest comes from the other GPUs.",
        ),
        Misconception(
            "what the ring moves",
            _bill(
                down=lambda r, b: r * 3 + 2 * b * 3,
            ),
            "You count the ring's bytes. PCIe carries this rank's own shard alone, before each "
            "gather; the gathers themselves go from GPU to GPU.",
        ),
        Misconception(
            "once to the device",
            _bill(down=lambda r, b: r + b),
            "You send each shard to the GPU once. What was gathered is freed after forward, and "
            "the shard's copy with it: backward's gather needs it again.",
        ),
        Misconception(
            "the root twice",
            _bill(down=lambda r, b: 2 * (r + b)),
            "You send the root's shard twice. It is gathered once: it stays whole from forward to "
            "backward.",
        ),
        Misconception(
            "one micro-batch",
            _bill(rounds=lambda g: 1),
            "You count one micro-batch. Each gathers anew, and each gives gradients, which go to "
            "the host.",
        ),
        Misconception(
            "bf16 on PCIe",
            _bill(itemsize=2),
            "You move 2 bytes for each element. Shards on the host are fp32, and are cast to bf16 "
            "on the GPU, after they have crossed.",
        ),
        Misconception(
            "gradients twice",
            _bill(up=lambda r, b: r + 2 * b),
            "You send gradients to the host twice. There is one reduce_scatter for each unit, and "
            "what it gives crosses once.",
        ),
        Misconception(
            "whole gradients",
            _bill(up=lambda r, b: 4 * (r + b)),
            "You send whole gradients to the host. Only this rank's shard goes there: it is "
            "reduced between GPUs first.",
        ),
        Misconception(
            "updates in each micro-batch",
            _bill(update=lambda r, b, g: g * 28 * (r + b)),
            "You update in each micro-batch. The optimizer steps once, after the last.",
        ),
        Misconception(
            "reads alone",
            _bill(update=lambda r, b, g: 16 * (r + b)),
            "You count what AdamW reads: weight, gradient, two moments. It writes three of them "
            "back: 12 bytes more.",
        ),
        Misconception(
            "the update over PCIe",
            _bill(slow=lambda pcie, memory: pcie),
            "You let the update run at PCIe's pace. It crosses nothing: all of it is on the host, "
            "and its pace is the memory's.",
        ),
        Misconception(
            "blocks' update alone",
            _bill(update=lambda r, b, g: 28 * b),
            "You update the blocks alone. The root's parameters are trained, too.",
        ),
        Misconception(
            "no dict",
            lambda *args: tuple(bill(*args).values()),
            'Your function does not return a dict with the keys "to_device", "to_host" and '
            '"update".',
        ),
    ),
)
