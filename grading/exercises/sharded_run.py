"""What a rank does, holds and sends while an answer trains a small model: checks of sharding.

Equal weights prove no sharding: a plain replicated optimizer has them too. So lessons 05 to 07 look
inside each rank. A check's `one_rank(answer, job)` runs there, by `small_model.on_small_model`:

    model, batches = sharded_run.built(job)              # the same model, this rank's own data
    run = sharded_run.ShardedRun(model)                  # before the answer makes anything
    step = answer(model, torch.optim.AdamW, lr=0.1)
    for batch in batches:
        model(batch).backward()
        with run.step():                                 # what is measured; the last one counts
            step()
    return run.report(dict(model.named_parameters()))

All that comes back is plain data, to be compared outside with what the reference did:

values        {name: numbers} of what `report` is given, where every collective was waited for.
resident      Bytes after the last step: "parameters" and "gradients" of the model;
              "optimizer states" of every optimizer that stepped, without the step counters; and
              "a whole copy kept": does all else that stayed alive come to the model's size? Up to
              three shards do not, on 4 ranks or more, whichever way they are kept.
collectives   "order", their kinds in order, repeated ones once; "bytes", the payload of each kind;
              "numbers", the kinds that moved FEW elements at most (a norm, say).
peak          Bytes of each category at the moment when it had most, and "total": see
              measure.LiveBytes. Given for `ShardedRun(model, peak=True)` alone.
moments       What `run.note(name)`, called in a hook, found alive then, by category; as `peak`.

`worded(compare)` is a comparison that says which of them are right, and which are not.
"""

import contextlib
import gc
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from course_lib import ranks
from course_lib.checks.comparison import Compare
from course_lib.measure import LiveBytes, storage_bytes
from course_lib.measure.live import state_tensors
from grading.exercises.small_model import DIGITS, SAMPLES, Regression

FEW = 8  # elements: no more than one number of each rank


def built(job: dict) -> tuple[Regression, list[torch.Tensor]]:
    """The model, the same on every rank, and this rank's batches, as many as job["steps"].

    Where job has "tied", the weights of those layers are one parameter: the first one's.
    """
    torch.set_num_threads(1)
    torch.manual_seed(job["seed"])
    widths = job["widths"]
    model = Regression(widths)
    for layer in job.get("tied", ()):
        model.layers[layer].weight = model.layers[job["tied"][0]].weight
    torch.manual_seed(1000 * job["seed"] + dist.get_rank())
    batches = [torch.randn(SAMPLES, widths[0] + widths[-1]) for _ in range(job["steps"])]
    return model, batches


class ShardedRun:
    """Measures one rank; see the module's docstring. Made before the answer makes anything.

    What is alive by then, but for the model, is not counted, so make the data before.
    """

    def __init__(self, model: nn.Module, peak: bool = False) -> None:
        self.model, self.size = model, storage_bytes(model.parameters())
        own = {_key(p) for p in model.parameters()}
        self._before = [t for t in _alive() if _key(t) not in own]  # kept: no address comes twice
        gc.freeze()  # what there is by now need not be looked through again
        self._tracks, self._live = peak, None
        self._peak: dict[str, int] = {}
        self._moments: dict[str, dict[str, int]] = {}
        self._optimizers: list[torch.optim.Optimizer] = []
        self._waited = _note_waits()
        self._entries: Sequence[ranks.log.Entry] = ()
        self._missed = 0  # collectives of the last step that were never waited for
        register_optimizer_step_post_hook(self._on_update)

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measure what is done in here; of several, the last one counts."""
        start = len(ranks.entries())
        self._waited.clear()
        self._live = LiveBytes(self.model, self) if self._tracks else None
        with self._live or contextlib.nullcontext():
            yield
        self._entries = ranks.entries()[start:]
        self._missed = len(self._entries) - len(self._waited)
        self._waited.clear()  # a work keeps its tensors alive
        if self._live:
            self._peak = _most(self._live.timeline)
            self._live = None

    def note(self, name: str) -> None:
        """Note what is alive at this moment of a step, by category."""
        if self._live:
            self._moments[name] = dict(self._live.now)

    def state_tensors(self) -> list[torch.Tensor]:
        """The states of all optimizers that stepped."""
        return [tensor for optimizer in self._optimizers for tensor in state_tensors(optimizer)]

    def report(self, values: Mapping[str, torch.Tensor], resident: bool = True) -> dict[str, dict]:
        """Plain data. The values are those that the case asks about; after the last step.

        Without `resident`, which takes a moment, where it is not what a check is about.
        """
        found = {
            "values": {name: _numbers(tensor) for name, tensor in values.items()},
            "collectives": collectives(self._entries),
        }
        if resident:
            found["resident"] = self.resident()
        if self._missed > 0:  # then what the values are is chance
            found["values"] = {f"{self._missed} collectives were never waited for": {}}
        if self._tracks:
            found["peak"] = self._peak
        if self._moments:
            found["moments"] = self._moments
        return found

    def resident(self) -> dict[str, int | bool]:
        """By category, now; gradients are counted as they are."""
        kept = self.kept()
        parameters = list(self.model.parameters())
        states = [tensor for optimizer in self._optimizers for tensor in _moments(optimizer)]
        return {
            "parameters": _bytes(parameters),
            "gradients": _bytes(p.grad for p in parameters if p.grad is not None),
            "optimizer states": _bytes(states),
            "a whole copy kept": kept >= self.size,
        }

    def kept(self) -> int:
        """Bytes of all tensors that the answer left alive, but for the three other categories.

        Gloo's threads hold the tensors of their last collective: give them others, and wait until
        nothing more is freed.
        """
        for _ in range(8):
            dist.barrier()
        self._waited.clear()
        readings: list[int] = []
        while len(set(readings[-3:])) != 1 or len(readings) < 3:
            time.sleep(0.01 * bool(readings))
            readings.append(self._kept_now())
        return readings[-1]

    def _kept_now(self) -> int:
        parameters = list(self.model.parameters())
        gradients = [p.grad for p in parameters if p.grad is not None]
        known = [*self._before, *parameters, *gradients, *self.state_tensors()]
        named = {_key(tensor) for tensor in known}
        return storage_bytes(tensor for tensor in _alive() if _key(tensor) not in named)

    def _on_update(self, optimizer: torch.optim.Optimizer, *_) -> None:
        if all(optimizer is not each for each in self._optimizers):
            self._optimizers.append(optimizer)


def collectives(entries: Iterable[ranks.log.Entry]) -> dict[str, object]:
    """What was communicated, as the module's docstring says."""
    entries = [entry for entry in entries if entry.kind != "barrier"]
    large = [entry for entry in entries if entry.elements > FEW]
    sent: Counter = Counter()
    for entry in large:
        sent[entry.kind] += entry.payload
    return {
        "order": ", ".join(kind for kind, _ in groupby(entry.kind for entry in large)),
        "bytes": dict(sent),
        "numbers": ", ".join(entry.kind for entry in entries if entry.elements <= FEW),
    }


ASPECTS = {  # in the order in which they explain most
    "collectives": "the collectives",
    "moments": "what is alive during the step",
    "peak": "the peak",
    "resident": "the bytes that stay",
    "values": "the numbers",
}


def worded(compare: Compare) -> Compare:
    """A comparison of reports {"rank 0": …} that says what is right of them, and what is not."""

    def words(expected: object, got: object) -> str | None:
        first = compare(expected, got)
        if first is None or (problem := _problem(got)):
            return first and problem
        if not _are_reports(got):
            return first
        wrong = {}  # aspect: rank and difference
        for rank, report in expected.items():
            for aspect in report:
                found = got.get(rank, {}).get(aspect)
                difference = compare(report[aspect], found)
                if difference and aspect not in wrong:
                    wrong[aspect] = f"{rank}: {_sentence(report[aspect], found) or difference}"
        if not wrong.keys() & ASPECTS:
            return first
        right = [ASPECTS[name] for name in ASPECTS if name in report and name not in wrong]
        praise = f"{' and '.join(right)} are right; " if right else ""
        first, *others = [name for name in ASPECTS if name in wrong]
        nor = "".join(f", nor {ASPECTS[name]}" for name in others)
        return f"{praise}not {ASPECTS[first]}{nor}: on {wrong[first]}"

    return words


def _problem(got: object) -> str:
    """What a rank says in place of a report, {sentence: {}}; '' where all have reports."""
    for rank, report in got.items() if isinstance(got, dict) else ():
        if isinstance(report, dict) and (sentence := _only_a_sentence(report)):
            return f"on {rank}: {sentence}"
    return ""


def _only_a_sentence(report: dict) -> str:
    return next(iter(report)) if report and list(report.values()) == [{}] else ""


def _sentence(expected: object, found: object) -> str:
    """A difference in words, where the names inside an aspect would say little."""
    if not isinstance(expected, dict) or not isinstance(found, dict):
        return ""
    for each, few in {"order": "", "numbers": " of a few numbers"}.items():
        want, sent = expected.get(each), found.get(each)
        if want is not None and sent is not None and want != sent:
            return f"you sent {sent or 'nothing'}{few}; expected {want or 'nothing'}"
    return _only_a_sentence(found)


def _are_reports(got: object) -> bool:
    reports = got.values() if isinstance(got, dict) else ()
    return bool(reports) and all(isinstance(r, dict) and r.keys() & ASPECTS for r in reports)


def fill_new_memory() -> None:
    """From now on a tensor without values holds NaN: torch.empty is not right by chance."""
    torch.use_deterministic_algorithms(True, warn_only=True)


def _moments(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Its states, without the step counters: moments may have one element, too."""
    items = [item for state in optimizer.state.values() for item in state.items()]
    return [x for name, x in items if name != "step" and isinstance(x, torch.Tensor)]


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the distinct tensors, whatever they may be views of."""
    return sum({(t.data_ptr(), t.numel()): t.nbytes for t in tensors}.values())


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _alive() -> list[torch.Tensor]:
    """Every tensor of this process that has bytes."""
    gc.collect()
    found = [x for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    return [t for t in found if t.layout == torch.strided and t.untyped_storage().nbytes()]


def _most(timeline) -> dict[str, int]:
    most: dict[str, int] = {}
    for moment in timeline:
        for name, nbytes in {**moment.live, "total": moment.total}.items():
            most[name] = max(most.get(name, 0), nbytes)
    return most


def _note_waits() -> dict[int, dist.Work]:
    """From now on, what this rank waits for, by id; kept alive, so that no id comes twice."""
    waited, wait = {}, dist.Work.wait

    def noted(work, *args, **options):
        waited[id(work)] = work
        return wait(work, *args, **options)

    dist.Work.wait = noted
    return waited


def _numbers(tensor: torch.Tensor | None) -> list | None:
    if not isinstance(tensor, torch.Tensor):
        return tensor
    return tensor.detach().double().numpy().round(DIGITS).tolist()
