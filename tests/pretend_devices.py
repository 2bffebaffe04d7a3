"""A CPU that pretends to be several devices, for models that are spread over them.

A tensor on a pretend device holds an ordinary tensor and says that it is elsewhere. Every operator that meets one is
run on the CPU with what the tensors hold, so that its numbers are the CPU's own, and raises where real devices would:
where tensors of different devices are mixed. What devices do beside that (their kernels' rounding, memory, streams) is
not pretended.
"""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TYPE = "maia"  # known to torch by name, and needs nothing to be initialised
CPU = torch.device("cpu")
INDEXING = ("index", "index_put_", "_index_put_impl_", "__getitem__", "__setitem__")
OF_THE_TENSOR_ITSELF = ("__get__", "__set__", "__deepcopy__", "to", "cpu", "_has_compatible_shallow_copy_type")


class Pretend(torch.Tensor):
    """A tensor that pretends to be on a device."""

    @staticmethod
    def __new__(cls, values: torch.Tensor, device: torch.device):
        place = {"dtype": values.dtype, "device": device, "storage_offset": values.storage_offset()}
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, values.stride(), **place)

    def __init__(self, values: torch.Tensor, _device: torch.device):
        self.values = values

    def __repr__(self):
        return f"{self.values!r} on {self.device}"

    def requires_grad_(self, _requires_grad=True):
        return self  # autograd would look for a driver

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    @property
    def _version(self) -> int:
        return self.values._version  # which views share, as those of a device do

    @classmethod
    def __torch_function__(cls, function, _types, args=(), kwargs=None):
        if function.__name__ not in OF_THE_TENSOR_ITSELF:
            with torch._C._DisableTorchDispatch():
                return _run(function, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, function, _types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


class PretendDevices(TorchDispatchMode):
    """A context in which tensors can be made on, and brought to, the devices `maia:0`, `maia:1`, …"""

    def __enter__(self):
        self.before = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # `torch.tensor` then makes a CPU's first, and copies it
        return super().__enter__()

    def __exit__(self, *error):
        torch._C._set_only_lift_cpu_tensors(self.before)
        return super().__exit__(*error)

    def __torch_dispatch__(self, function, _types, args=(), kwargs=None):
        return _run(function, args, kwargs or {})


def _run(function, args: tuple, kwargs: dict):
    """Run an operator on what its tensors hold."""
    tensors, asked = (_leaves((args, kwargs), kind) for kind in (torch.Tensor, torch.device))
    device = asked[0] if asked else _where(function, args, tensors)
    args, kwargs = _mapped(_values, (args, kwargs))
    if device.type == TYPE:
        device = torch.device(TYPE, device.index or 0)
    given = {id(_values(tensor)): tensor for tensor in tensors}

    def placed(values):
        if not isinstance(values, torch.Tensor):
            return values
        if id(values) in given:
            same = given[id(values)]
            assert same.shape == values.shape, f"{function} changes a shape in place, which is not pretended"
            if same.device == device:
                return same
            values = values.clone()
        return Pretend(values, device) if device.type == TYPE else values

    if "histc" in str(function):  # of integers GPUs count as they are, and CPUs only as floats
        args = (args[0].float(), *args[1:])
    return _mapped(placed, function(*args, **kwargs))


def _mapped(change, tree):
    """Nested arguments or results with each leaf changed; torch's own trees take most of a test's time."""
    if isinstance(tree, (tuple, list)) and not isinstance(tree, torch.Size):
        return type(tree)([_mapped(change, part) for part in tree])
    if isinstance(tree, dict):
        return {name: _mapped(change, part) for name, part in tree.items()}
    return change(tree)


def _leaves(tree, kind: type) -> list:
    found = []
    _mapped(lambda leaf: found.append(leaf) if isinstance(leaf, kind) else None, tree)
    return found


def _values(leaf):
    """What an operator on the CPU is given in the place of an argument."""
    if isinstance(leaf, torch.device):
        return CPU
    return leaf.values if isinstance(leaf, Pretend) else leaf


def _where(function, args: tuple, tensors: list[torch.Tensor]) -> torch.device:
    """The device that an operator's result is on; raise RuntimeError if it mixes devices."""
    if not tensors:
        return CPU
    name = str(function).split(".")[1] if isinstance(function, torch._ops.OpOverload) else function.__name__
    if name in ("to", "_to_copy", "copy_"):
        return tensors[-1 if name == "to" else 0].device
    # as on GPUs: numbers on the CPU go with everything, and its indices too
    indices = map(id, _leaves(args[1], torch.Tensor)) if name in INDEXING else ()
    anywhere = {*indices, *(id(tensor) for tensor in tensors if tensor.ndim == 0)}
    devices = {tensor.device for tensor in tensors if tensor.device.type != "cpu" or id(tensor) not in anywhere}
    if len(devices) > 1:
        raise RuntimeError(f"{name} mixes devices: {', '.join(sorted(map(str, devices)))}")
    return devices.pop() if devices else CPU
