"""A GPU where there is none: tensors that say they lie elsewhere and are computed on the CPU. Used by test_gpu.py.

What a real one would refuse is an error: an operation on tensors of both sides, a draw there from a generator of the CPU,
numpy of what lies there. Not pretended: bfloat16, kernels, their roundings, nccl. Its device calls itself meta, the one name
besides cpu that every build of torch knows, so what asks for "cuda" by name is not reached.
"""
import contextlib
import importlib

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map

import encoder

GPU = torch.device("meta", 0)
INDEXING = ("index", "index_put", "index_put_", "_index_put_impl_")  # of what lies there by numbers that lie here
COPYING = ("copy_", "_to_copy")
STRICT = ("cat", "stack", "index_select")  # elsewhere a number, of no dimension, may come from anywhere


class Elsewhere(torch.Tensor):
    """A tensor on GPU; `here` holds its values."""

    @staticmethod
    def __new__(cls, here):
        return torch.Tensor._make_wrapper_subclass(cls, here.size(), strides=here.stride(), dtype=here.dtype, device=GPU,
                                                   storage_offset=here.storage_offset())

    def __init__(self, here):
        self.here = here

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})

    def __repr__(self):
        return f"Elsewhere({self.here})"

    def tolist(self):
        return self.here.tolist()


class Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return run(func, args, kwargs or {})


def within(x):
    """The tensors of an operation's arguments. torch's own tree functions are a third of the time of these tests."""
    if isinstance(x, torch.Tensor):
        return [x]
    return [tensor for part in x for tensor in within(part)] if isinstance(x, (tuple, list)) else []


def replaced(x, change):
    """An operation's arguments or results with change(tensor) in place of every tensor."""
    if isinstance(x, torch.Tensor):
        return change(x)
    return type(x)([replaced(part, change) for part in x]) if type(x) in (tuple, list) else x


def run(func, args, kwargs):
    """An operation of torch, carried out here, its result where a GPU's would be."""
    name, tensors = func._schema.name.split("::")[1], within([*args, *kwargs.values()])
    there = [x for x in tensors if isinstance(x, Elsewhere)]
    here = [x for x in tensors if not isinstance(x, Elsewhere) and (x.dim() or name in STRICT)]
    allowed = name in COPYING or (name in INDEXING and isinstance(args[0], Elsewhere)
                                  and all(any(x is index for index in within(args[1])) for x in here))
    if there and here and not allowed:
        raise RuntimeError(f"{name}: some tensors are on the GPU and some are not, {[tuple(x.shape) for x in tensors]}")
    device = kwargs.get("device")
    lands = torch.device(device) == GPU if device is not None else (
        isinstance(args[0], Elsewhere) if name == "copy_" else bool(there) and name != "_local_scalar_dense")
    if lands and kwargs.get("generator") is not None:
        raise RuntimeError(f"{name}: a generator of the CPU for numbers on the GPU")
    if device is not None:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    values, *named = replaced([args, *kwargs.values()], lambda x: x.here if isinstance(x, Elsewhere) else x)
    found = func(*values, **dict(zip(kwargs, named)))
    own = {id(x.here): x for x in there}  # what is changed in place stays itself
    return replaced(found, lambda x: own[id(x)] if id(x) in own else Elsewhere(x)) if lands else found


@contextlib.contextmanager
def pretend_gpu(monkeypatch, *modules):
    """Let the scripts of these names, run in this process and in float32, find a GPU."""
    tensor, save, load_masked_lm = torch.tensor, torch.save, encoder.load_masked_lm

    def load(name):  # transformers uses the device meta itself, and at its first model the torch.tensor that torch has
        with _disable_current_modes(), monkeypatch.context() as real:
            real.setattr(torch, "tensor", tensor)
            return load_masked_lm(name)

    monkeypatch.setattr(torch, "tensor", lambda data, device=None, **kw: (
        tensor(data, **kw).to(device) if device == GPU else tensor(data, device=device, **kw)))  # it asks no mode
    monkeypatch.setattr(torch, "save", lambda state, file: save(tree_map(
        lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, state), file))
    monkeypatch.setattr(encoder, "load_masked_lm", load)
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda mode: None)  # it would hold for the tests after this one
    monkeypatch.setattr(encoder.Encoder, "autocast", lambda self: contextlib.nullcontext())
    for name in modules:
        monkeypatch.setattr(importlib.import_module(name), "pick_device", lambda wanted: GPU)
    with Dispatch():
        yield
