"""Plain data: what may cross from the place where an answer ran to the place where it is judged.

None, bool, int, float, str, lists and string-keyed dicts of them, and numpy arrays of numbers.
Values are rebuilt, not passed on: a subclass with an `__eq__` of its own does not survive.
"""

import sys

import numpy as np

Plain = None | bool | int | float | str | list | dict | np.ndarray


class NotPlain(TypeError):
    """The value, or something in it, is of a kind that an answer cannot be."""


def plain(value: object) -> Plain:
    """Rebuild `value` from plain types; tuples become lists, tensors become arrays.

    Raises NotPlain, with a sentence, for anything else.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, (int, np.integer)):
        return int(value)
    if isinstance(value, (float, np.floating)):
        return float(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {_key(key): plain(item) for key, item in value.items()}
    torch = sys.modules.get("torch")
    if torch and isinstance(value, torch.Tensor):
        value = value.detach().cpu()
        if not value.dim():
            return plain(value.item())
        value = (value.float() if value.dtype.itemsize == 2 else value).numpy()
    if type(value) is np.ndarray and value.dtype.kind in "biuf":
        return value.copy()
    raise NotPlain(f"it returned {_a(type(value).__name__)}, which cannot be compared")


def _key(key: object) -> str:
    if isinstance(key, (str, int)):
        return str(key)
    raise NotPlain(f"it returned a dict with {_a(type(key).__name__)} as a key; use strings")


def _a(name: str) -> str:
    return f"{'an' if name[0] in 'aeiouAEIOU' else 'a'} {name}"
