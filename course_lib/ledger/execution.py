"""How a job's operators are executed: with which kernels, and by which ranks together."""

from dataclasses import dataclass

from course_lib.specs.checking import known, whole

UPDATES = ("one by one", "foreach", "fused")


@dataclass(frozen=True)
class Execution:
    """With which kernels a program runs.

    attention   'flash': one kernel; 'explicit': scores [S, S] for each head, softmax, and product
    norm        'fused': one kernel; 'unfused': several, in fp32 (RMSNorm alone)
    activation  'unfused'; 'fused': SwiGLU's product and activation in one kernel
    loss_chunks the loss is taken of so many chunks of tokens, one after another
    dropout     on attention's scores and before each sum, as GPT-2 has it
    device      'cuda'; 'cpu': attention's operands and its output are copied into its order
    sums_in_place   see `tape`
    update      the optimizer's way, see `replay`; '' is PyTorch's default on the device
    keeps_logits    the fp32 logits live on until backward is done, as a training loop may hold them

    Full checkpointing computes each block again. Selective checkpointing: of explicit attention,
    what is between q, k, v and its output (Korthikanti et al. 2022); where attention is flash,
    which does that itself, all of a block but the outputs of attention and of every second linear
    layer (as torchtitan does).

    `tensor_parallel` ranks share heads and the MLP's inner size of each block; with
    `sequence_parallel` they share the tokens of all else, too (Korthikanti et al. 2022).
    """

    attention: str = "flash"
    norm: str = "fused"
    activation: str = "unfused"
    loss_chunks: int = 1
    dropout: bool = False
    device: str = "cuda"
    sums_in_place: bool = True
    update: str = ""
    keeps_logits: bool = False
    tensor_parallel: int = 1
    sequence_parallel: bool = False

    def __post_init__(self) -> None:
        known("attention called", self.attention, ("flash", "explicit"))
        known("norm called", self.norm, ("fused", "unfused"))
        known("activation called", self.activation, ("fused", "unfused"))
        known("device called", self.device, ("cuda", "cpu"))
        known("update called", self.update, ("", *UPDATES))
        whole("loss_chunks", self.loss_chunks)
        whole("tensor_parallel", self.tensor_parallel)


CUDA = Execution()
CPU = Execution(norm="unfused", device="cpu", sums_in_place=False)
