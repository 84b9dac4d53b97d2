"""The precision recipes: in which dtype the parameters, gradients and master copy are held.

What counts is what is held at rest, between two steps. Autocast and FSDP's mixed precision compute
in bf16 and yet hold fp32: casts are made for the moment and are no model state. So these recipes
cost what fp32 costs; what they save is activations, communication and time.
"""

from dataclasses import dataclass

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class Precision:
    """The dtypes at rest, each a key of DTYPE_BYTES.

    `master` is that of the copy which the optimizer updates in place of the parameters, None where
    it updates the parameters themselves. `main_gradients` is that of a second copy of the
    gradients, kept for the master; None where the optimizer reads the gradients themselves.
    """

    name: str
    parameters: str
    gradients: str
    master: str | None = None
    main_gradients: str | None = None
    note: str = ""
    source: str = ""


ZERO_PAPER = "ZeRO, arXiv 1910.02054, section 3.1"
MEGATRON = "Megatron-LM, docs/user-guide/features/dist_optimizer.md"

PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision(
            name="fp32",
            parameters="fp32",
            gradients="fp32",
            note="Single precision throughout.",
            source="PyTorch's default dtype",
        ),
        Precision(
            name="amp-bf16",
            parameters="fp32",
            gradients="fp32",
            note="torch.autocast: each operation casts what it reads to bf16; all is held in fp32.",
            source="PyTorch, torch.amp",
        ),
        Precision(
            name="fsdp-bf16",
            parameters="fp32",
            gradients="fp32",
            note="MixedPrecisionPolicy(param_dtype=bf16): fp32 shards, gathered as bf16.",
            source="PyTorch, torch.distributed.fsdp.fully_shard",
        ),
        Precision(
            name="zero-fp16",
            parameters="fp16",
            gradients="fp16",
            master="fp32",
            note="fp16 parameters and gradients; the optimizer keeps an fp32 master copy.",
            source=ZERO_PAPER,
        ),
        Precision(
            name="zero-bf16",
            parameters="bf16",
            gradients="bf16",
            master="fp32",
            note="As zero-fp16, in bf16: the same bytes.",
            source=ZERO_PAPER,
        ),
        Precision(
            name="megatron-bf16",
            parameters="bf16",
            gradients="fp32",
            master="fp32",
            note="bf16 parameters, gradients accumulated in fp32, an fp32 master copy.",
            source=MEGATRON,
        ),
        Precision(
            name="megatron-fp16",
            parameters="fp16",
            gradients="fp16",
            master="fp32",
            main_gradients="fp32",
            note="fp16 parameters and gradients; the optimizer keeps an fp32 copy of both.",
            source=MEGATRON,
        ),
        Precision(
            name="megatron-fp32",
            parameters="fp32",
            gradients="fp32",
            note="Single precision throughout, in Megatron-LM.",
            source=MEGATRON,
        ),
        Precision(
            name="pure-bf16",
            parameters="bf16",
            gradients="bf16",
            note="model.to(bfloat16): the moments are bf16 too, and small updates round away.",
            source="PyTorch, torch/optim/adam.py",
        ),
    )
}
