"""Importance matrices of llama.cpp, which `llama-imatrix` writes and `common_imatrix_load` reads."""

import tempfile
from pathlib import Path

import gguf
import numpy as np

from outliers.errors import UserError
from outliers.files import write_whole
from outliers.models.gguf.tensors import tensor_names


class _Writer(gguf.GGUFWriter):
    def add_architecture(self) -> None:
        """Write no architecture: importance matrices have none."""


def write_imatrix(path: Path, sums: dict[str, np.ndarray], tokens: int, text: str, chunks: int, block: int) -> None:
    """Write the sums of squares (features,) of the inputs of weights, by name, and the number of tokens they are summed
    over.

    In the file, NAME.in_sum2 is float32 (1, features) and NAME.counts float32 (1, 1), where NAME is that of the weight.
    """
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "imatrix.gguf"
        writer = _Writer(file, "")
        writer.add_type(gguf.GGUFType.IMATRIX)
        writer.add_array(gguf.Keys.IMatrix.DATASETS, [text])
        writer.add_uint32(gguf.Keys.IMatrix.CHUNK_COUNT, chunks)
        writer.add_uint32(gguf.Keys.IMatrix.CHUNK_SIZE, block)
        for name in sorted(sums):
            writer.add_tensor(f"{name}.in_sum2", sums[name][None].astype(np.float32))
            writer.add_tensor(f"{name}.counts", np.array([[tokens]], np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        write_whole(path, file.read_bytes())


def by_weight(architecture: str, read: list[tuple[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Return the sums of modules' inputs by the names of their weights in GGUF files; raise UserError if there are
    none."""
    if not read:
        raise UserError("this trace is of an earlier version, which does not say what reads its states; trace again")
    names = tensor_names(architecture, (module for module, _ in read))
    if not names:
        raise UserError(f"none of the traced states is read by a weight of a GGUF file of '{architecture}'")
    return {names[module]: squares for module, squares in read if module in names}
