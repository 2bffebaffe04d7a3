"""Shapes of the product's tiles, by architecture, what follows the product, and number of tokens."""

from typing import NamedTuple

import torch


class Tile(NamedTuple):
    """The share of one program in the product: rows × columns of the output, `depth` features at a time."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int

    @property
    def blocks(self) -> dict[str, int]:
        """The arguments of a launch."""
        names = ("BLOCK_ROWS", "BLOCK_COLUMNS", "BLOCK_DEPTH", "num_warps", "num_stages")
        return dict(zip(names, self, strict=True))


ANY = float("inf")

# Capability, and whether inputs are 16 bits wide and absmax: tile for up to so many tokens. Others need more registers,
# for zeropoint terms in float64 or for the digits of float32 outliers. Starting values from published kernels, not
# tuned, less those that spill. Those of 8.0 stay under 99 KiB of shared memory, which is what 8.6, 8.9 and 12.0 have.
TILES = {
    ((8, 0), True): {
        32: Tile(16, 32, 512, warps=4, stages=4),
        128: Tile(64, 64, 128, warps=4, stages=4),
        512: Tile(64, 128, 128, warps=4, stages=4),
        ANY: Tile(128, 128, 64, warps=4, stages=4),
    },
    ((8, 0), False): {
        32: Tile(16, 32, 512, warps=4, stages=4),
        128: Tile(64, 64, 128, warps=4, stages=4),
        ANY: Tile(64, 128, 128, warps=8, stages=4),
    },
    ((9, 0), True): {
        32: Tile(16, 32, 512, warps=4, stages=4),
        128: Tile(64, 64, 256, warps=4, stages=5),
        512: Tile(64, 128, 256, warps=4, stages=4),
        ANY: Tile(128, 256, 128, warps=8, stages=4),
    },
    ((9, 0), False): {
        32: Tile(16, 32, 512, warps=4, stages=4),
        128: Tile(64, 64, 256, warps=4, stages=5),
        512: Tile(64, 128, 256, warps=8, stages=4),
        ANY: Tile(128, 128, 128, warps=8, stages=3),
    },
}


def choose(rows: int, light: bool, device: torch.device) -> Tile:
    """The tile for so many rows, such as tokens; that of capability 8.0 on every device that has no tiles of its own.

    light: whether inputs are 16 bits wide and absmax.
    """
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    by_rows = TILES.get((capability, light), TILES[(8, 0), light])
    return next(tile for largest, tile in by_rows.items() if rows <= largest)
