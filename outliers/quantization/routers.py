"""Routers of mixtures of experts under a scheme; without the remedy `router` they stay exact."""

from collections.abc import Iterator

from torch import nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from outliers.criterion import ROUTER
from outliers.errors import UserError
from outliers.models.anatomy import Projection, layers_of, reader_at, state_readers
from outliers.quantization.linear import QuantizedLinear
from outliers.quantization.magnitudes import Calibration
from outliers.quantization.schemes import Scheme


def routers(model: PreTrainedModel) -> Iterator[Projection]:
    for layer in layers_of(model):
        yield from (reader_at(layer, ROUTER, name) for name in layer.anatomy.router)


class _Routed:
    """A replacement for a router's forward that multiplies under a scheme and leaves the rest unchanged."""

    def __init__(self, router: Projection, product: QuantizedLinear):
        self.path, self.module, self.product = router.path, router.module, product

    def __call__(self, *args, **keywords):
        exchanged = _Exchanged(self.product)
        with exchanged:
            output = type(self.module).forward(self.module, *args, **keywords)
        if not exchanged.count:
            raise UserError(
                f"the router '{self.path}' multiplies with its weight in a way that no scheme can replace; expected a "
                "linear layer: leave router out"
            )
        return output


class _Exchanged(TorchFunctionMode):
    """A mode in which a quantized layer computes the products with a router's weight; count: number of such
    products."""

    def __init__(self, product: QuantizedLinear):
        super().__init__()
        self.product, self.count = product, 0

    def __torch_function__(self, func, _types, args=(), kwargs=None):
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | (kwargs or {})
        if func is not functional.linear or given["weight"].shape != self.product.shape:
            return func(*args, **(kwargs or {}))
        self.count += 1
        x = given["input"]
        return self.product(x.to(self.product.weight.dtype)).to(x.dtype)


def take_routers_back(model: PreTrainedModel) -> None:
    """Undo `put_routers`."""
    for router in routers(model):
        if isinstance(vars(router.module).get("forward"), _Routed):
            del router.module.forward


def put_routers(model: PreTrainedModel, scheme: Scheme, exact_paths: set[str], calibration: Calibration | None) -> None:
    """Put the routers of a model under a scheme, except those that are left exact.

    calibration: required if the scheme needs statistics of the routers' inputs.

    Raises:
        UserError: a router has no weight matrix, or the scheme needs statistics that the calibration lacks.
    """
    read = {reader.path: reader for reader in state_readers(model)}
    for router in routers(model):
        if router.path in exact_paths:
            continue
        parameters = router.module._parameters
        weight = parameters.get("weight")
        if weight is None or weight.ndim != 2:
            raise UserError(f"the router '{router.path}' has no weight that is a matrix; leave router out")
        linear = nn.Linear(*weight.shape[::-1], bias=parameters.get("bias") is not None, device="meta")
        linear._parameters |= {name: parameters[name] for name in linear._parameters if name in parameters}
        reader = read[router.path]._replace(module=linear)
        calibrated = scheme.at(reader.role).needs_calibration
        product = QuantizedLinear(linear, scheme, reader.role, calibration.of(reader) if calibrated else None)
        product.draw = getattr(model, "draw", 0)
        vars(router.module)["forward"] = _Routed(router, product)
