"""Importance matrices of llama.cpp: what `llama-imatrix` writes and `common_imatrix_load` reads, of a trace."""

import logging
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np

from outliers.criterion import DEAD, RESIDUAL, check_threshold
from outliers.errors import UserError, first_of
from outliers.files import write_whole
from outliers.models.gguf.tensors import tensor_names

if TYPE_CHECKING:
    from outliers.tracing.result import Trace

UNKNOWN = "unknown"  # the text of a trace that does not say it
PLACES = 8  # hidden states with features that never fire, in a message
logger = logging.getLogger(__name__)


class _Writer(gguf.GGUFWriter):
    def add_architecture(self) -> None:
        """Nothing: such a file is of no architecture."""


def write_imatrix(path: Path, trace: "Trace", floor: float) -> None:
    """Write the sums of squares of each projection's input and how many tokens they are of; see `Trace.save_imatrix`.

    In the file, NAME.in_sum2 is float32 (1, features) and NAME.counts float32 (1, 1), NAME being that of the weight.
    """
    least = trace.positions * (check_threshold("floor", floor, DEAD) if floor else 0)
    sums = _sums(trace)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "imatrix.gguf"
        writer = _Writer(file, "")
        writer.add_type(gguf.GGUFType.IMATRIX)
        writer.add_array(gguf.Keys.IMatrix.DATASETS, [str(trace.about.get("text", UNKNOWN))])
        writer.add_uint32(gguf.Keys.IMatrix.CHUNK_COUNT, trace.sequences)
        writer.add_uint32(gguf.Keys.IMatrix.CHUNK_SIZE, trace.block)
        for name in sorted(sums):
            writer.add_tensor(f"{name}.in_sum2", sums[name][None].clip(least).astype(np.float32))
            writer.add_tensor(f"{name}.counts", np.array([[trace.positions]], np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        write_whole(path, file.read_bytes())
    _warn(path, trace, floor)


def _warn(path: Path, trace: "Trace", floor: float) -> None:
    """Say which features never fire and what has no entry."""
    dead = trace.dead_features().groupby(["role", "layer"], sort=False)["feature"].agg(list)
    if len(dead):
        width = sum(squares.numel() for name, squares in trace.statistics.items() if name.endswith(".squares"))
        where = [f"{role} of layer {layer}: {first_of(features)}" for (role, layer), features in dead.items()]
        logger.warning(
            f"{dead.str.len().sum():,} of {width:,} inputs of projections never fire on this text; their importance in "
            f"'{path.name}' is {floor:g} ({'; '.join(where[:PLACES])}{'; …' * (len(where) > PLACES)}); a longer text "
            "may reach them"
        )
    if trace.experts:
        logger.warning(f"'{path.name}' has no entry for the experts of this model, each of which reads some tokens")


def _sums(trace: "Trace") -> dict[str, np.ndarray]:
    """The sums of squares, float64 (features,), by the names of the weights that they are multiplied with."""
    read = [
        (module, squares.numpy())
        for role, of_layers in trace.modules.items()
        if role != RESIDUAL
        for modules, squares in zip(of_layers, trace.statistics[f"{role}.squares"], strict=True)
        for module in modules
    ]
    if not read:
        raise UserError("this trace is of an earlier version, which does not say what reads its states; trace again")
    names = tensor_names(trace.architecture, (module for module, _ in read))
    if not names:
        raise UserError(f"none of the traced states is read by a weight of a GGUF file of '{trace.architecture}'")
    return {names[module]: squares for module, squares in read if module in names}
