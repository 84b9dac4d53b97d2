"""Python objects as bytes, between the parent and its ranks.

cloudpickle carries what a notebook cell or a script defined (functions and classes travel by
value) and `torch.save` the tensors, so that two tensors that share a storage share it afterwards.
Nothing refers to shared memory: the bytes outlive the process that made them.
"""

import io
import marshal
from collections import ChainMap
from types import CodeType, SimpleNamespace

import cloudpickle
import torch
from torch.distributed.device_mesh import DeviceMesh


def _code(code: CodeType) -> tuple:
    return marshal.loads, (marshal.dumps(code),)


def _mesh(mesh: DeviceMesh) -> tuple:
    raise TypeError("a DTensor belongs to its ranks: take its .to_local() or .full_tensor()")


class Pickler(cloudpickle.Pickler):
    """Keeps the file name of code, which a report needs and cloudpickle drops; refuses DTensors.

    A DTensor could be read only where its process group is.
    """

    dispatch_table = ChainMap(
        {CodeType: _code, DeviceMesh: _mesh}, cloudpickle.Pickler.dispatch_table
    )


PICKLE = SimpleNamespace(__name__="wire", Pickler=Pickler)  # what torch.save takes for a module


def pack(value: object) -> bytes:
    """`value` as bytes; raises whatever pickling it raises."""
    buffer = io.BytesIO()
    torch.save(value, buffer, pickle_module=PICKLE, pickle_protocol=5)
    return buffer.getvalue()


def unpack(packed: bytes) -> object:
    """What `pack` was given, with tensors on the CPU. Trusts the bytes: they can run code."""
    return torch.load(io.BytesIO(packed), map_location="cpu", weights_only=False)
