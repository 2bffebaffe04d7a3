"""Importance matrices of llama.cpp, which `llama-imatrix` writes and `common_imatrix_load` reads."""

import tempfile
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np

from outliers.errors import UserError
from outliers.files import write_whole
from outliers.models.gguf.tensors import expert_names, tensor_names


class _Writer(gguf.GGUFWriter):
    def add_architecture(self) -> None:
        """Write no architecture: importance matrices have none."""


class InputSums(NamedTuple):
    """The sums of squares (matrices, features) of a weight's inputs, and the numbers of summed tokens (matrices,).

    A weight is one matrix, or one matrix for each expert.
    """

    squares: np.ndarray
    tokens: np.ndarray


def write_imatrix(path: Path, sums: dict[str, InputSums], text: str, chunks: int, block: int) -> None:
    """Write the sums of the inputs of weights, by the names of the weights; text: the name of the text, of which there
    are `chunks` sequences of `block` tokens.

    In the file, NAME.in_sum2 is float32 (matrices, features) and NAME.counts float32 (matrices, 1), where NAME is that
    of the weight.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "imatrix.gguf"
        writer = _Writer(file, "")
        writer.add_type(gguf.GGUFType.IMATRIX)
        writer.add_array(gguf.Keys.IMatrix.DATASETS, [text])
        writer.add_uint32(gguf.Keys.IMatrix.CHUNK_COUNT, chunks)
        writer.add_uint32(gguf.Keys.IMatrix.CHUNK_SIZE, block)
        for name in sorted(sums):
            writer.add_tensor(f"{name}.in_sum2", sums[name].squares.astype(np.float32))
            writer.add_tensor(f"{name}.counts", sums[name].tokens[:, None].astype(np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        write_whole(path, file.read_bytes())


def sums_by_weight(architecture: str, by_module: list[tuple[str, InputSums]]) -> dict[str, InputSums]:
    """Return the sums of modules' inputs, given with the modules' paths, by the names of their weights in GGUF files;
    raise UserError if there are none."""
    if not by_module:
        raise UserError("this trace is of an earlier version, which does not say what reads its states; trace again")
    names = tensor_names(architecture, (module for module, _ in by_module))
    if not names:
        raise UserError(f"none of the traced states is read by a weight of a GGUF file of '{architecture}'")
    return {names[module]: sums for module, sums in by_module if module in names}


def expert_sums(architecture: str, layer: int, states: InputSums, units: InputSums) -> dict[str, InputSums]:
    """Return the sums of the inputs of a layer's experts, `states` of the first projections and `units` of the last
    ones, by the names of their weights in GGUF files."""
    by_role = {"ffn_in": states, "ffn_out": units}
    return {name: sums for role, sums in by_role.items() for name in expert_names(architecture, layer, role)}
