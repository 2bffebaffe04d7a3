"""Tile shapes of the product, by architecture, number of tiles, and inputs."""

from functools import cache
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
        names = ("BLOCK_ROWS", "BLOCK_COLUMNS", "BLOCK_DEPTH", "num_warps", "num_stages")
        return dict(zip(names, self, strict=True))


FEW = 32  # most tokens of `few.multiply_few`, each of whose programs takes all
# By capability, and whether inputs are 16 bits wide and absmax ("light"): tiles, the largest first. Other inputs need
# more registers, for zeropoint terms in float64 or for the digits of float32 outliers. The light tiles of 9.0 were
# measured on an H100 (commit 5a5d541), the others were not. Those of 8.0 fit 99 KiB of shared memory, the limit of
# 8.6, 8.9 and 12.0.
TILES = {
    ((8, 0), True): (Tile(128, 128, 64, 4, 4), Tile(64, 128, 128, 4, 4), Tile(64, 64, 128, 4, 4)),
    ((8, 0), False): (Tile(64, 128, 128, 8, 4), Tile(64, 64, 128, 4, 4)),
    ((9, 0), True): (Tile(128, 128, 128, 4, 3), Tile(64, 128, 128, 4, 4), Tile(64, 64, 128, 4, 3)),
    ((9, 0), False): (Tile(64, 128, 128, 8, 4), Tile(64, 64, 128, 4, 3)),
}
WAVES = 1.5  # programs per multiprocessor from which on the largest tile is the fastest


@cache
def choose(matrices: int, rows: int, columns: int, light: bool, device: torch.device) -> Tile:
    """Return the largest tile that gives a device enough programs, or else the smallest; devices without tiles of their
    own use those of capability 8.0.

    light: whether inputs are 16 bits wide and absmax.
    """
    capability, processors = (8, 0), 108
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        processors = torch.cuda.get_device_properties(device).multi_processor_count
    tiles = TILES.get((capability, light), TILES[(8, 0), light])
    enough = (
        tile for tile in tiles if matrices * -(-rows // tile.rows) * -(-columns // tile.columns) >= WAVES * processors
    )
    return next(enough, tiles[-1])
