"""What one micro-batch does on a rank that has everything: the part of a step no stage changes.

Activations, and what operators make on the way, are the same whatever is sharded. So they are
measured once, in one process, and a prediction adds what a stage holds (see `peak`). The record
also says when something happens of which a stage takes advantage: forward enters and leaves a
module, backward reaches it, is through with it, and completes a gradient. What a checkpoint has
computed again within backward is there as it was: modules are entered again, and perhaps left.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from course_lib.ledger.work import Event
from course_lib.measure.live import storage_bytes
from course_lib.measure.tracker import LiveBytes


def work(model: nn.Module, loss: Callable[[], torch.Tensor]) -> tuple[Event, ...]:
    """The events of one micro-batch, whose forward is `loss()`.

    `model` has no gradients yet, and is left without any. Modules take and give tensors.
    """
    events: list[Event] = []
    parameters = storage_bytes(model.parameters())
    seen = 1  # moments that belong to an event before; the first is that before the micro-batch

    def note(kind: str, name: str) -> None:
        live.note(kind)
        totals = [moment.total - parameters for moment in live.timeline[seen:]]
        events.append(Event(kind, name, totals[-1], max(totals)))
        go_on()

    def go_on() -> None:
        nonlocal seen
        seen = len(live.timeline) - 1  # what is live now counts for the next event, too

    def enter(name, module, args):
        note("enter", name)
        return watched(args, partial(note, "through", name))

    def leave(name, module, args, output):
        note("leave", name)
        if output.requires_grad:
            output.register_hook(lambda gradient: note("reach", name))

    def complete(name, parameter):
        note("gradient", name)
        parameter.grad = None
        live.note("taken")
        go_on()

    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(partial(enter, name)))
        hooks.append(module.register_forward_hook(partial(leave, name)))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            hooks.append(parameter.register_post_accumulate_grad_hook(partial(complete, name)))
    try:
        with LiveBytes(model) as live:
            output = loss()
            note("loss", "")
            output.backward()
            del output
            note("end", "")
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(events)


def watched(args: tuple, on_gradients: Callable[[], None]) -> tuple:
    """The same with aliases of tensors, such that backward tells when it has the gradients of all
    of them."""
    if not torch.is_grad_enabled():
        return args
    to_come = 0

    def on_gradient(gradient: torch.Tensor) -> None:
        nonlocal to_come
        to_come -= 1
        if not to_come:
            on_gradients()

    def alias(x):
        nonlocal to_come
        if not isinstance(x, torch.Tensor) or not x.requires_grad:
            return x
        to_come += 1
        x = x.view_as(x)
        x.register_hook(on_gradient)
        return x

    return tuple(map(alias, args))
