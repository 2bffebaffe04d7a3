"""What loading uses of transformers beyond its public names: all of it by name, and in one file."""

import ast
import inspect
from pathlib import Path

import pytest
import transformers

import outliers
from outliers.models import internals

MODELS = Path(outliers.__file__).parent / "models"
CALLED = {  # private function to the arguments that it is given
    "AutoHfQuantizer.from_config": ["quantization_config", "pre_quantized"],
    "TensorProcessor": ["config"],
    "TensorProcessor.process": ["self", "weights", "name", "tensor_key_mapping", "parsed_parameters"],
    "WeightRenaming": ["source_patterns", "target_patterns"],
    "_default_apply_gate": ["self", "gate_up_out"],
    "_read_metadata": ["blob", "gguf_path"],
    "_read_tensor_table": ["blob", "tensor_count", "pos"],
    "auto_conversion": ["pretrained_model_name_or_path"],
    "dot_natural_key": ["s"],
    "generate_merges": ["vocab", "vocab_scores", "skip_tokens"],
    "get_gguf_hf_weights_map": ["hf_model", "processor"],
    "get_checkpoint_conversion_mapping": ["model_type"],
    "get_model_conversion_mapping": ["model", "hf_quantizer"],
    "is_env_variable_true": ["env_variable"],
    "rename_source_key": [
        *("source_key", "weight_renamings", "weight_converters", "base_model_prefix", "meta_state_dict")
    ],
}
TABLES = {  # private table to a name in it
    "ALL_EXPERTS_FUNCTIONS": "grouped_mm",
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES": "llama",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES": "llava",
    "MODEL_FOR_MASKED_LM_MAPPING_NAMES": "bert",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES": "t5",
    "TENSOR_PROCESSORS": "llama",
}
# Of models: methods, by their arguments, and what classes declare.
METHODS = {
    "_get_dtype_plan": ["dtype"],
    "_init_weights": ["module"],
    "tie_weights": ["missing_keys", "recompute_mapping"],
}
DECLARED = {
    *("_keys_to_ignore_on_load_missing", "_keys_to_ignore_on_load_unexpected", "_no_split_modules"),
    *("_skip_keys_device_placement", "all_tied_weights_keys", "base_model_prefix"),
}


@pytest.mark.parametrize("name", CALLED)
def test_private_functions_take_what_they_are_given(name):
    function = internals
    for part in name.split("."):
        function = getattr(function, part)
    parameters = inspect.signature(function).parameters
    arguments = [argument for argument in CALLED[name] if argument in parameters]
    assert arguments == CALLED[name] or any(one.kind is one.VAR_KEYWORD for one in parameters.values())


def test_models_have_what_loading_asks_of_them():
    model = transformers.AutoModelForCausalLM.from_config(transformers.GPT2Config(n_embd=8, n_layer=1, n_head=1))
    for name, arguments in METHODS.items():
        assert set(arguments) <= set(inspect.signature(getattr(model, name)).parameters), name
    assert [name for name in DECLARED if not hasattr(model, name)] == []
    assert [table for table, entry in TABLES.items() if entry not in getattr(internals, table)] == []


def test_one_file_uses_what_is_private():
    """Beside attention, whose functions are registered in tables of transformers."""
    found, named = {}, {name.partition(".")[0] for name in CALLED} | set(TABLES)
    for file in set(MODELS.rglob("*.py")) - {MODELS / "attention.py"}:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("transformers."):
                names = {alias.name for alias in node.names if not hasattr(transformers, alias.name)}
                found.setdefault(file.name, set()).update(names - {"logging", "Cache", "ModelOutput"})  # documented
    assert {file for file, names in found.items() if names} == {"internals.py"}
    assert found["internals.py"] == named
