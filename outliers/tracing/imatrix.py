"""Importance matrices of llama.cpp: what `llama-imatrix` writes and `common_imatrix_load` reads, of a trace."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np

from outliers.criterion import RESIDUAL
from outliers.errors import UserError
from outliers.files import write_whole
from outliers.models.gguf.tensors import tensor_names

if TYPE_CHECKING:
    from outliers.tracing.result import Trace

UNKNOWN = "unknown"  # the text of a trace that does not say it


class _Writer(gguf.GGUFWriter):
    def add_architecture(self) -> None:
        """Nothing: such a file is of no architecture."""


def write_imatrix(path: Path, trace: "Trace") -> None:
    """Write the sums of squares of each projection's input and how many tokens they are of; see `Trace.save_imatrix`.

    In the file, NAME.in_sum2 is float32 (1, features) and NAME.counts float32 (1, 1), NAME being that of the weight.
    """
    sums = _sums(trace)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "imatrix.gguf"
        writer = _Writer(file, "")
        writer.add_type(gguf.GGUFType.IMATRIX)
        writer.add_array(gguf.Keys.IMatrix.DATASETS, [str(trace.about.get("text", UNKNOWN))])
        writer.add_uint32(gguf.Keys.IMatrix.CHUNK_COUNT, trace.sequences)
        writer.add_uint32(gguf.Keys.IMatrix.CHUNK_SIZE, trace.block)
        for name in sorted(sums):
            writer.add_tensor(f"{name}.in_sum2", sums[name][None].astype(np.float32))
            writer.add_tensor(f"{name}.counts", np.array([[trace.positions]], np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        write_whole(path, file.read_bytes())


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
