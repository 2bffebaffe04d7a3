"""What functions of a model and blocks share, such as padding that they cut off; and what they refuse in one line."""

import pandas as pd
import pytest
import torch
from torch import nn

import outliers
from outliers import Cells, UserError, ablate, damage, masks, origins, perplexity, quantize, readers, run, trace
from outliers.errors import BrokenModel
from outliers.metrics.keys import observed_channels
from outliers.metrics.records import Continuation
from tests.small_models import make_model, padded
from tests.tracing.test_tracing import hooks

BLOCKS = torch.randint(100, (3, 24), generator=torch.Generator().manual_seed(1))
LONG = torch.zeros(1, 70, dtype=torch.int64)
OF_BLOCKS = {  # functions of a model and blocks
    "perplexity": perplexity,
    "trace": trace,
    "masks": masks,
    "damage": lambda model, blocks, **fields: damage(model, blocks, **{"scheme": "absmax"} | fields),
    "ablate": lambda model, blocks, **fields: ablate(model, blocks, **{"features": [3]} | fields),
    "origins": lambda model, blocks, **fields: origins(model, blocks, **{"features": [3]} | fields),
    "readers": lambda model, blocks, **fields: readers(model, blocks, **{"features": [3]} | fields),
}
FUNCTIONS = OF_BLOCKS | {"super_weights": outliers.super_weights, "keys": observed_channels}
NO_BLOCKS = {  # whatever is measured
    "none": ([], "no blocks to (evaluate|trace|mark|account for|measure)|no blocks"),
    "longer than the context": (LONG, "blocks of 70 tokens are longer than the model's context of 64"),
    "a token that is not there": (torch.full((1, 4), 100), "token id 100 is outside the model's vocabulary of 100"),
    "a list of numbers": ([[1, 2, 3]], r"a block is of type list; expected int64 token ids \(T,\)"),
    "one token": (torch.zeros(1, 1, dtype=torch.int64), "at least 2 tokens|has 1 tokens"),
    "numbers that are no ids": (torch.ones(2, 3), r"a block is float32 of shape \(3,\)"),
}
FEATURES = {  # of whatever takes features
    "none": ([], "list of features is empty"),
    "beyond the last": ([3, 32], "feature 32 is out of range; .* features 0 to 31"),
    "before the first": ([-1], "feature -1 is out of range"),
}
NAN = float("nan")
OTHERS = [  # function, its arguments, and what is said
    ("perplexity", {"blocks": torch.ones(3, dtype=torch.int64)}, r"a block is int64 of shape \(\); expected int64"),
    ("perplexity", {"blocks": [torch.ones(0, dtype=torch.int64)]}, r"a block is int64 of shape \(0,\)"),
    ("ablate", {"features": range(17)}, "17 of 32 features leave 15 others"),
    ("ablate", {"features": [1.5]}, "features are whole numbers"),
    ("ablate", {"controls": NAN}, "nan controls"),
    ("ablate", {"seed": 0.5}, "seed is 0.5; expected"),
    ("ablate", {"where": ["attn_out"]}, "unknown place 'attn_out'"),
    ("origins", {"positions": [24]}, "position 24 is in none of the blocks"),
    ("origins", {"model": make_model("opt-350m")}, "norms rescale its residual stream"),
    ("origins", {"model": nn.Linear(2, 2)}, "not a transformers model"),
    ("readers", {"places": ["gate"]}, "place 'gate': layer 0 has no such reader of the residual stream; expected some"),
    ("readers", {"places": ["x"]}, "unknown place 'x'"),
    ("readers", {"places": ["layers.2.q"]}, "place 'layers.2.q' in a model of 2 layers"),
    ("readers", {"controls": 1}, "1 controls; expected at least 2 random features, 10000 at most"),
    ("readers", {"controls": 40}, "leave 31 others that are not outliers, too few to draw 40 random ones"),
    ("readers", {"seed": -1}, "seed is -1; expected"),
    ("super_weights", {"blocks": []}, "no blocks to evaluate"),
    ("super_weights", {"controls": 0}, "field 'controls': .*, got 0$"),
    ("super_weights", {"controls": "many"}, "field 'controls': .*, got 'many'$"),
    ("damage", {"scheme": "fp32"}, "scheme 'fp32' quantizes nothing"),
    (
        "damage",
        {"by": []},
        "no part of the damage is requested; expected some of error, role, layer, stack, head, model",
    ),
    ("damage", {"by": "all"}, "unknown part of the damage 'all'"),
    ("damage", {"by": ["stack"]}, "has one stack of layers"),
    ("damage", {"skip": ["transformer"]}, "leaves nothing for scheme 'absmax'"),
    ("damage", {"model": make_model("gpt2").bfloat16(), "draws": 2}, "2 draws in bfloat16"),
    ("damage", {"model": quantize(make_model("gpt2"), "absmax", keep="int8")}, "keeps only int8 codes"),
    ("trace", {"roles": ["ffn_up"]}, "unknown role 'ffn_up'; did you mean"),
    ("trace", {"roles": []}, "no roles to trace"),
    ("trace", {"alpha": 0}, "alpha is 0"),
    ("trace", {"blocks": [BLOCKS[0], BLOCKS[1, :1]]}, "sequence 1 has 1 tokens; expected at least 2"),
    ("masks", {"trace": "of another model"}, r"of \(layers, features\) \(2, 24\) for a model of \(2, 32\)"),
]


AS_TABLES = {
    "ablate": pd.DataFrame,
    "damage": lambda found: found.errors,
    "origins": lambda found: found.states(),
    "readers": pd.DataFrame,
}


@pytest.mark.parametrize("function", AS_TABLES)
def test_a_padded_batch_is_its_sequences(function):
    """Padding itself is a matter of tests of texts."""
    model, (sequences, ids, mask) = make_model("llama"), padded(BLOCKS, "left")
    found, alone = OF_BLOCKS[function](model, ids, attention_mask=mask), OF_BLOCKS[function](model, sequences)
    pd.testing.assert_frame_equal(AS_TABLES[function](found), AS_TABLES[function](alone))


def refused(function: str, arguments: dict, said: str) -> None:
    if "trace" in arguments:
        arguments = {"trace": outliers.trace(outliers.load_model("pocket/gpt2-0.1m"), BLOCKS)}
    with pytest.raises(UserError, match=said):
        FUNCTIONS[function](**{"model": make_model("gpt2"), "blocks": BLOCKS} | arguments)


@pytest.mark.parametrize("blocks", NO_BLOCKS)
@pytest.mark.parametrize("function", OF_BLOCKS)
def test_what_is_no_block(function, blocks):
    refused(function, {"blocks": NO_BLOCKS[blocks][0]}, NO_BLOCKS[blocks][1])


@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("function", ["ablate", "origins", "readers"])
def test_what_is_no_feature(function, features):
    refused(function, {"features": FEATURES[features][0]}, FEATURES[features][1])


@pytest.mark.parametrize(("function", "arguments", "said"), OTHERS, ids=[f"{one[0]}, {one[2]:.40}" for one in OTHERS])
def test_what_a_function_cannot_do(function, arguments, said):
    refused(function, arguments, said)


AT_NORM = "NaN or inf first in the hidden states of layer 1, role ffn_in, feature 7"


@pytest.mark.parametrize(
    ("function", "parameter", "arguments", "said"),
    [
        ("perplexity", "ln_2.weight", {}, AT_NORM),
        ("damage", "ln_2.weight", {"by": ["layer"]}, AT_NORM),
        ("damage", "ln_2.weight", {"by": ["error"]}, "the output of 'transformer.h.1.mlp.c_fc' has the energy nan"),
        ("super_weights", "mlp.c_proj.bias", {}, "NaN or inf at a second feed-forward projection"),
        ("keys", "attn.c_attn.bias", {}, "NaN or inf in the keys of layer 1"),
    ],
)
def test_a_model_with_nan_is_named(function, parameter, arguments, said):
    model = make_model("gpt2")
    values = model.transformer.h[1].get_parameter(parameter)
    with torch.no_grad():
        values[32 + 7 if function == "keys" else 7] = torch.nan
    with pytest.raises(BrokenModel, match=said):
        FUNCTIONS[function](model, BLOCKS, **arguments)
    assert hooks(model) == 0


BERT, T5, SHORT = ["pocket/bert-1.4m"], ["pocket/t5-1.9m"], ["A short one."] * 99


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"metrics": [Continuation()], "stream": True}, "leave --stream out"),
        ({"metrics": [Continuation()], "models": BERT}, "continues no text"),
        ({"metrics": [Continuation(tokens=256)]}, "more than the context"),
        ({"stride": 33}, "stride is 33; expected at most 32"),
        ({"scored": 32}, "scored is 32; expected at most 31"),
        ({"stride": 8, "documents": True}, "leave --documents or --stride out"),
        ({"stride": 8, "models": BERT}, "leave --stride out"),
        ({"documents": True, "text": torch.zeros(99, dtype=torch.int64)}, "no document in 3 blocks has two tokens"),
        ({"documents": True, "models": BERT}, "'pocket/bert-1.4m' reads no documents by themselves"),
        ({"documents": True, "models": T5}, "'pocket/t5-1.9m' reads no documents by themselves"),
        ({"documents": True, "text": torch.arange(5, 500)}, "none of 3 blocks of 32 tokens holds two documents"),
        ({"documents": True, "text": ["A long document of one. " * 99]}, "none of 3 blocks of 32 tokens holds two doc"),
        ({"documents": True, "metrics": ["latency"], "text": SHORT}, "prompts of one length from documents of several"),
    ],
)
def test_what_cannot_be_run(fields, said, tmp_path):
    with pytest.raises(UserError, match=said):
        run(Cells(**{"models": ["pocket/gpt2-0.1m"], "block": 32, "blocks": 3} | fields), tmp_path)
