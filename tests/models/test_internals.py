"""What loading uses of transformers beyond its public names: all of it by name, and in one file."""

import ast
from pathlib import Path

import transformers

import outliers

MODELS = Path(outliers.__file__).parent / "models"
PRIVATE = {
    *("ALL_EXPERTS_FUNCTIONS", "AutoHfQuantizer", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "TENSOR_PROCESSORS"),
    *("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES", "MODEL_FOR_MASKED_LM_MAPPING_NAMES", "TensorProcessor"),
    *("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES", "WeightRenaming", "_default_apply_gate", "_read_metadata"),
    *("_read_tensor_table", "auto_conversion", "dot_natural_key", "generate_merges", "is_env_variable_true"),
    *("get_checkpoint_conversion_mapping", "get_gguf_hf_weights_map", "get_model_conversion_mapping"),
    "rename_source_key",
}


def test_one_file_uses_what_is_private():
    """Beside attention, whose functions are registered in tables of transformers."""
    found = {}
    for file in set(MODELS.rglob("*.py")) - {MODELS / "attention.py"}:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers."):
                names = {alias.name for alias in node.names if not hasattr(transformers, alias.name)}
                found.setdefault(file.name, set()).update(names - {"logging", "Cache", "ModelOutput"})  # documented
    assert {file for file, names in found.items() if names} == {"internals.py"}
    assert found["internals.py"] == PRIVATE
