"""What `python -m outliers.anatomy` shows of a model."""

from transformers import AutoConfig

import outliers


def test_each_kind_of_layer_with_its_roles_shapes_and_parameters():
    found = outliers.anatomy("pocket/gpt2-0.1m")
    config = AutoConfig.for_model("gpt2", n_embd=found.features)
    wide = 4 * config.n_embd
    columns = ["role", "module", "inputs", "outputs", "quantized"]
    assert found.table[columns].to_numpy().tolist() == [
        ["attn_in", "attn.c_attn", config.n_embd, 3 * config.n_embd, True],
        ["attn_out", "attn.c_proj", config.n_embd, config.n_embd, True],
        ["ffn_in", "mlp.c_fc", config.n_embd, wide, True],
        ["ffn_out", "mlp.c_proj", wide, config.n_embd, True],
    ]
    assert set(found.table["layers"]) == {tuple(range(found.layers))}
    assert found.quantized == 100


def test_experts_are_projections_in_one_row(monkeypatch):
    """671 billion parameters of DeepSeek-V3, from its default configuration alone."""
    found = outliers.anatomy("deepseek_v3")
    assert round(found.parameters / 1e9) == 671
    assert found.quantized > 99.9, "all but the routers"
    (into,) = found.table.query("module == 'mlp.experts.0:256.gate_up_proj'").to_dict("records")
    assert (into["role"], into["inputs"], into["outputs"], into["parameters"]) == (
        "ffn_in",
        7168,
        4096,
        256 * 7168 * 4096,
    )
    monkeypatch.setenv("COLUMNS", "80")
    assert max(map(len, str(found).splitlines())) <= 80
