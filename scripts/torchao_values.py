"""Write what torchao makes of small matrices, with which a test compares number formats.

    python scripts/torchao_values.py

The values are kept, because those of its prototypes change from one version to the next, and the extra `peers` may have
another one. It needs torch and torchao alone, and nothing of this project.
"""

import json
from pathlib import Path

import torch
import torchao
from torchao.prototype.mx_formats.mx_tensor import MXTensor
from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

PATH = Path(__file__).parent.parent / "tests" / "kernels" / "torchao_values.json"
MICROSCALING = {  # by the names of this project
    "mxfp8-e4m3": torch.float8_e4m3fn,
    "mxfp8-e5m2": torch.float8_e5m2,
    "mxfp6-e2m3": "fp6_e2m3",
    "mxfp6-e3m2": "fp6_e3m2",
    "mxfp4": torch.float4_e2m1fn_x2,
}


def matrix(rows: int, features: int, seed: int) -> torch.Tensor:
    """Return values of many magnitudes, float32 (rows, features)."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randn(rows, features, generator=generator).mul_(2).exp_()
    return torch.randn(rows, features, generator=generator).mul_(sizes)


def microscaling() -> dict:
    """Return scales and dequantized values of each format; the inputs have ties, zeros, and very small values."""
    x = matrix(6, 64, 0)
    x[1, :40] = 0
    x[2] *= 1e-30
    x[3] = torch.arange(64) / 8
    found = {"x": x.tolist()}
    for name, element in MICROSCALING.items():
        made = MXTensor.to_mx(x, element, 32)
        found[name] = {"scale": made.scale.float().tolist(), "values": made.dequantize(torch.float32).tolist()}
    return found


def nvfp4() -> dict:
    """Return dequantized values, and the scales of groups, times that of the matrix."""
    x = matrix(6, 64, 1).clamp(-50, 50)
    whole = per_tensor_amax_to_scale(x.abs().max())
    made = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=whole)
    scale = made.scale.float().view(6, 4) * whole
    return {"x": x.tolist(), "scale": scale.tolist(), "values": made.dequantize(torch.float32).tolist()}


def main() -> None:
    """Write all values, with the versions of the libraries."""
    found = {"torchao": torchao.__version__, "torch": torch.__version__}
    found |= {"microscaling": microscaling(), "nvfp4": nvfp4()}
    PATH.write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
