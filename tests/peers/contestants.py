"""Our DDP and stages and their peers, all driven alike: the same model, data and steps.

A contestant wraps a model that is the same on all ranks. In one `step` each rank gives its
micro-batches, and what moves the parameters is the mean of their gradients, and of all ranks'.
`parameters()` are whole, by the model's own names. Each class shows how its library is used; what
two of them mean differently is written where they are compared.

FSDP that keeps parameters whole from forward to backward stands beside stage 2, as is usual. It
holds less than that between steps, since there its parameters are sharded, too.
"""

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from course_lib import models, specs
from course_lib.comm.buckets import BUCKET_BYTES
from course_lib.models.llama import Block
from course_lib.sharded.ddp import DDP
from course_lib.sharded.fsdp import FSDP
from course_lib.sharded.zero1 import ZeRO1
from course_lib.sharded.zero2 import ZeRO2
from course_lib.sharded.zero3 import ZeRO3


@dataclass(frozen=True)
class Job:
    """What all contestants do alike, by AdamW with `options`, with buckets of `bucket_bytes`."""

    spec: specs.ModelSpec
    micro_batches: int = 1
    max_norm: float | None = None
    options: dict = field(default_factory=lambda: {"lr": 1e-3})
    bucket_bytes: int = BUCKET_BYTES


class Loss(nn.Module):
    """A model and its loss in one, so that all of it passes through a wrapper."""

    def __init__(self, spec: specs.ModelSpec) -> None:
        super().__init__()
        self.model = models.build(spec)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model.loss(tokens)


class Contestant:
    """A wrapped module with an optimizer: what PyTorch's have in common."""

    def __init__(self, job: Job, **options) -> None:
        self.job = job
        self.module = Loss(job.spec)
        self.wrapped = self.wrap(**options)
        self.optimizer = self.make_optimizer()

    def wrap(self) -> Callable:
        raise NotImplementedError

    def make_optimizer(self):
        return torch.optim.AdamW(self.wrapped.parameters(), **self.job.options)

    def step(self, micro_batches: Sequence[torch.Tensor]) -> float:
        """Train on this rank's micro-batches. The mean of their losses."""
        total = 0.0
        for number, tokens in enumerate(micro_batches, start=1):
            with self.last() if number == len(micro_batches) else self.not_last():
                loss = self.forward(tokens)
                self.backward(loss)
                total += loss.item()
        self.update()
        return total / len(micro_batches)

    def last(self) -> contextlib.AbstractContextManager:
        return contextlib.nullcontext()

    not_last = last  # FSDP then reduces each micro-batch's gradients and adds up shards

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.wrapped(tokens)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.job.micro_batches).backward()

    def update(self) -> None:
        if self.job.max_norm is not None:
            self.clip(self.job.max_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self, max_norm: float) -> None:
        clip_grad_norm_(self.wrapped.parameters(), max_norm)

    def parameters(self) -> dict[str, torch.Tensor]:
        with self.whole():
            return {name: p.detach().clone() for name, p in self.module.model.named_parameters()}

    def whole(self) -> contextlib.AbstractContextManager:
        """While the module's parameters are whole."""
        return contextlib.nullcontext()


class Replicated(Contestant):
    """DDP, ours or PyTorch's."""

    def wrap(self):
        return DDP(self.module, self.job.bucket_bytes)

    def not_last(self):
        return self.wrapped.no_sync()


class TorchDDP(Replicated):
    def wrap(self):
        return DistributedDataParallel(
            self.module,
            gradient_as_bucket_view=True,
            bucket_cap_mb=self.job.bucket_bytes / 2**20,
        )


class TorchZeRO1(TorchDDP):
    """ZeroRedundancyOptimizer, which gives each parameter to one rank, beside PyTorch's DDP."""

    def __init__(self, job: Job, as_view: bool = False) -> None:
        self.as_view = as_view
        super().__init__(job)

    def make_optimizer(self):
        return ZeroRedundancyOptimizer(
            self.wrapped.parameters(),
            torch.optim.AdamW,
            parameters_as_bucket_view=self.as_view,
            **self.job.options,
        )


class FullyShard(Contestant):
    """FSDP2: each block is a unit, and what is outside of them is one more."""

    def wrap(self, reshard: bool = True):
        for block in self.module.model.model.layers:
            fully_shard(block, reshard_after_forward=reshard)
        return fully_shard(self.module, reshard_after_forward=reshard)

    def parameters(self):
        return {name: p.full_tensor() for name, p in self.module.model.state_dict().items()}


class OurFSDP(Contestant):
    """Ours, with the same units."""

    def wrap(self):
        self.fsdp = FSDP(self.module)
        return self.module

    def clip(self, max_norm: float) -> None:
        self.fsdp.clip_grad_norm_(max_norm)

    def whole(self):
        return self.fsdp.gathered()


class FSDP1(Contestant):
    """FullyShardedDataParallel, with the same units as FullyShard."""

    def wrap(self):
        return FullyShardedDataParallel(
            self.module,
            auto_wrap_policy=ModuleWrapPolicy({Block}),
            use_orig_params=True,
            device_id=torch.device("cpu"),
        )

    def clip(self, max_norm: float) -> None:
        self.wrapped.clip_grad_norm_(max_norm)

    def parameters(self):
        with FullyShardedDataParallel.summon_full_params(self.wrapped, writeback=False):
            named = list(self.module.model.named_parameters())
            return {name.replace("_fsdp_wrapped_module.", ""): p.clone() for name, p in named}


class Ours(Contestant):
    """ZeRO-1, 2 or 3: the wrapper is the optimizer, too."""

    def wrap(self, stage):
        self.stage = stage
        return self.module

    def make_optimizer(self):
        cut = {} if self.stage is ZeRO3 else {"bucket_bytes": self.job.bucket_bytes}
        return self.stage(
            self.module, torch.optim.AdamW, max_norm=self.job.max_norm, **cut, **self.job.options
        )

    def backward(self, loss: torch.Tensor) -> None:
        self.optimizer.backward(loss / self.job.micro_batches)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def whole(self):
        return self.optimizer.gathered() if self.stage is ZeRO3 else contextlib.nullcontext()


class DeepSpeed(Contestant):
    """DeepSpeed on the CPU. Its engine divides by the number of micro-batches, clips and updates
    by itself: its `step` comes after each micro-batch, and does nothing but after the last."""

    def wrap(self, stage: int, **options):
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed

        # Each time it warns that what it calls in PyTorch has a new name.
        warnings.simplefilter("ignore", FutureWarning)
        logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
        # As large as ours, in elements. By default it allocates 2 GB for one.
        names = ("reduce_bucket_size", "allgather_bucket_size")
        buckets = dict.fromkeys(names, self.job.bucket_bytes // 4)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": self.job.micro_batches,
            "gradient_clipping": self.job.max_norm or 0.0,
            "optimizer": {"type": "AdamW", "params": self.job.options | {"torch_adam": True}},
            "zero_optimization": {"stage": stage, **buckets, **options},
            "zero_force_ds_cpu_optimizer": False,
        }
        with contextlib.redirect_stdout(io.StringIO()):  # it says what it has built
            return deepspeed.initialize(model=self.module, config=config, dist_init_required=False)[
                0
            ]

    def make_optimizer(self):
        return self.wrapped.optimizer

    def backward(self, loss: torch.Tensor) -> None:
        self.wrapped.backward(loss)
        self.wrapped.step()

    def update(self) -> None:
        pass

    def whole(self):
        import deepspeed

        parameters = list(self.module.parameters())
        enabled = hasattr(parameters[0], "ds_id")  # stage 3
        return deepspeed.zero.GatheredParameters(parameters, enabled=enabled)


OURS = {
    "DDP": Replicated,
    "ZeRO1": partial(Ours, stage=ZeRO1),
    "ZeRO2": partial(Ours, stage=ZeRO2),
    "ZeRO3": partial(Ours, stage=ZeRO3),
    "FSDP": OurFSDP,
}
# By the stage whose peers they are.
TORCH = {
    0: {"PyTorch's DDP": TorchDDP},
    1: {
        "ZeroRedundancyOptimizer": TorchZeRO1,
        "ZeroRedundancyOptimizer, views": partial(TorchZeRO1, as_view=True),
    },
    2: {"fully_shard, not resharded": partial(FullyShard, reshard=False)},
    3: {"fully_shard": FullyShard, "FSDP1": FSDP1},
}
# Stage 3 keeps parameters of fewer than 100,000 elements whole, where it is not told otherwise.
DEEPSPEED = {stage: {f"DeepSpeed {stage}": partial(DeepSpeed, stage=stage)} for stage in range(4)}
DEEPSPEED[3]["DeepSpeed 3, all sharded"] = partial(
    DeepSpeed, stage=3, stage3_param_persistence_threshold=0
)
