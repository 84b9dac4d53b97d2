"""What a training job is: a model, a recipe, a strategy, a cluster.

    model("llama3-8b")                        a preset; read_config("config.json") for any other
    Recipe(precision="zero-fp16")             dtypes, optimizer, batch: which copies there are
    Strategy("zero3", gpus=64)                who holds which shard
    Cluster(gpus=64, gpu="h100-sxm-80")       the machines
    Collective("all_gather", 1000, 4, 8)      what crosses between ranks

All are frozen dataclasses, and check what they are given. Nothing here imports more than the
standard library.
"""

from course_lib.specs.cluster import Cluster, Gpu, Link, gpu, gpus, link, links
from course_lib.specs.collective import Collective
from course_lib.specs.config import read_config
from course_lib.specs.model_spec import ModelSpec
from course_lib.specs.optimizer import OPTIMIZERS, Optimizer
from course_lib.specs.precision import DTYPE_BYTES, PRECISIONS, Precision
from course_lib.specs.presets import model, models
from course_lib.specs.recipe import CHECKPOINTING, MODEL_STATES, Copy, Recipe
from course_lib.specs.strategy import OFFLOADED, SHARDED, Strategy
from course_lib.specs.tensors import TensorSpec
from course_lib.specs.units import gb, gib, human

__all__ = [
    "CHECKPOINTING",
    "DTYPE_BYTES",
    "MODEL_STATES",
    "OFFLOADED",
    "OPTIMIZERS",
    "PRECISIONS",
    "SHARDED",
    "Cluster",
    "Collective",
    "Copy",
    "Gpu",
    "Link",
    "ModelSpec",
    "Optimizer",
    "Precision",
    "Recipe",
    "Strategy",
    "TensorSpec",
    "gb",
    "gib",
    "gpu",
    "gpus",
    "human",
    "link",
    "links",
    "model",
    "models",
    "read_config",
]
