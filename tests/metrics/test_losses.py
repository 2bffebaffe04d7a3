"""Losses by token and bits per byte, against transformers' logits in float64 and the bytes of the text."""

import json
import logging
import math

import pytest
import torch
from transformers import AutoModelForCausalLM

import outliers
from outliers import Cells, Sweep, UserError, run
from outliers.runs.run import show
from outliers.subjects.masked import each_masked, masked_text
from outliers.subjects.seq2seq import prefixed, span_corrupted
from outliers.text.blocks import cut_text
from outliers.views.emergence import emergence_table
from outliers.views.perplexity import bits_table, perplexity_section
from outliers.views.token_losses import token_losses_section
from tests.conftest import STORIES, needs_shared, needs_smollm2

MODEL = "pocket/gpt2-0.1m"
DOCUMENTS = ["Café 日本 🎉, it is\n\n\tso.  ", "A second one, plain.", "é"]  # of 2-, 3- and 4-byte characters
SMALL = {"models": [MODEL], "block": 32, "blocks": 3}
READERS = [MODEL, "pocket/bert-1.4m", "pocket/t5-1.9m"]
READERS += [
    pytest.param(str(STORIES), marks=needs_shared, id="stories260K"),
    pytest.param("smollm2-135m", marks=needs_smollm2),
]


def exact_losses(model, blocks) -> torch.Tensor:
    """Losses of the predicted tokens of blocks, float64 (blocks, T − 1), from transformers' logits."""
    with torch.no_grad():
        logits = model(blocks).logits[:, :-1].double()
    return torch.nn.functional.cross_entropy(logits.mT, blocks[:, 1:], reduction="none")


@pytest.mark.parametrize("name", READERS)
def test_the_tokens_of_a_document_stand_for_its_bytes(name):
    """Wherever blocks cut it; the end of a document stands for none."""
    tokenizer = outliers.load_tokenizer(name)
    cut = cut_text(DOCUMENTS, tokenizer, 2)
    ids, sizes = cut.ids.flatten().tolist(), cut.sizes.flatten().tolist()
    ends = [number for number, token in enumerate(ids) if token == tokenizer.eos_token_id]
    bounds = [0, *ends][: len(DOCUMENTS)]
    found = [sum(sizes[start:end]) for start, end in zip(bounds, ends, strict=False)]
    assert found == [len(document.encode()) for document in DOCUMENTS[: len(found)]] and len(found) >= 2
    assert all(sizes[end] == 0 for end in ends)


@pytest.mark.parametrize("name", [MODEL, pytest.param("smollm2-135m", marks=needs_smollm2)])
def test_tokens_of_bytes_stand_for_them(name):
    """Each character of the name of a token is a byte, also where several tokens share a character of the text."""
    tokenizer = outliers.load_tokenizer(name)
    cut = cut_text(["🙂🙃 " + DOCUMENTS[0]], tokenizer, 20, 1)  # two neighbours of several tokens each
    (ids,), (sizes,) = cut.ids.tolist(), cut.sizes.tolist()
    assert sizes == [len(token) for token in tokenizer.convert_ids_to_tokens(ids)]


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("pocket/bert-1.4m", masked_text),
        ("pocket/bert-1.4m", each_masked),
        ("pocket/t5-1.9m", span_corrupted),
        ("pocket/t5-1.9m", prefixed),
    ],
)
def test_predicted_tokens_stand_for_their_own_bytes(name, made):
    """Of these tokenizers each character of a token's name is a byte."""
    tokenizer = outliers.load_tokenizer(name)
    examples = made(DOCUMENTS * 20, tokenizer, 32, 2)
    special = [*tokenizer.all_special_ids, *tokenizer.convert_tokens_to_ids([f"<extra_id_{n}>" for n in range(20)])]
    labels = [[token for token in row if token >= 0 and token not in special] for row in examples.labels.tolist()]
    assert examples.sizes.tolist() == [sum(map(len, tokenizer.convert_ids_to_tokens(row))) for row in labels]


@pytest.mark.parametrize("bos", [False, True])
def test_bits_per_byte(tmp_path, bos):
    """In Python and in rows: the loss of transformers, in bits, over the bytes that a model of bytes decodes."""
    model, tokenizer = outliers.load_model(MODEL), outliers.load_tokenizer(MODEL)
    blocks = outliers.load_text("sample", tokenizer, 32, 3, bos)
    text = "".join(tokenizer.batch_decode(blocks[:, 1:]))
    want = exact_losses(model, blocks).sum().item() / math.log(2) / len(text.encode())
    assert outliers.bits_per_byte(model, "sample", tokenizer, 32, 3, bos) == pytest.approx(want, rel=1e-6)
    row, drawn = (run(Cells(**SMALL, bos=bos, draws=draws), tmp_path)[0] for draws in (1, 2))
    assert row["bits_per_byte"] == pytest.approx(want, rel=1e-6)
    assert row["bytes"] == len(text.encode()) and "bits_per_byte_deviation" not in row
    assert drawn["bits_per_byte_deviation"] > 0 and drawn["bits_per_byte"] == pytest.approx(want, rel=1e-6)


def test_ids_have_no_bytes(tmp_path):
    tokenizer = outliers.load_tokenizer(MODEL)
    ids = outliers.load_text("sample", tokenizer, 32, 3)
    for text in (ids, ids.flatten(), ids.tolist()):
        (row,) = run(Cells(**SMALL, text=text), tmp_path)
        assert not {"bits_per_byte", "bytes"} & row.keys()
    with pytest.raises(UserError, match="bits per byte of token ids"):
        outliers.bits_per_byte(outliers.load_model(MODEL), ids, tokenizer, 32, 3)


def test_tables_show_bits_where_rows_have_them(tmp_path):
    rows = run(Sweep(**SMALL, schemes=["fp32", "absmax"]), tmp_path)
    section = perplexity_section(rows)
    assert "bits per byte" in section.text and "Bits per byte compare across models" in section.text
    assert [table.name for table in section.tables] == ["table1", "table1_bits", "table1_increase"]
    assert bits_table(rows)[0].cells[0][1] == f"{rows[0]['bits_per_byte']:.4f}"
    before = [{name: value for name, value in row.items() if name not in ("bits_per_byte", "bytes")} for row in rows]
    assert [table.name for table in perplexity_section(before).tables] == ["table1", "table1_increase"]
    assert "byte" not in perplexity_section(before).text
    assert bits_table([before[0], rows[1]])[0].cells[0][0] == "absmax", "rows without it are left out"
    traced = {"model": MODEL, "metric": "count", "value": 1.0, "parameters": 1}
    assert "Bits/byte" in emergence_table([traced, rows[0]]).headers
    assert "Bits/byte" not in emergence_table([traced, before[0]]).headers


def prefixing(folder) -> str:
    """A model whose tokenizer begins a text with a token of its own."""
    outliers.load_model(MODEL).save_pretrained(folder)
    tokenizer = outliers.load_tokenizer(MODEL)
    tokenizer.save_pretrained(folder)
    file = folder / "tokenizer.json"
    content, first = json.loads(file.read_text()), tokenizer.bos_token
    single = [{"SpecialToken": {"id": first, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {first: {"id": first, "ids": [tokenizer.bos_token_id], "tokens": [first]}}
    template = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": tokens}
    file.write_text(json.dumps(content | {"post_processor": template}))
    return str(folder)


def positions_anew(ids: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Positions (1, T) of a block that begin with 0 behind each end of a document."""
    places = torch.arange(len(ids))
    begins = torch.cat([torch.zeros(1, dtype=torch.bool), ends[:-1]])
    return (places - torch.where(begins, places, 0).cummax(0).values)[None]


@needs_shared
@pytest.mark.parametrize("stream", [False, True])
def test_documents_by_themselves(tmp_path, stream):
    """As transformers has documents in one block, by positions that begin anew; each has its own first token given."""
    texts = ["Once upon a time there was a fox.", "It ran home and slept well.", "A dog", "One day a girl woke."] * 7
    tokenizer = outliers.load_tokenizer(str(STORIES))
    blocks = outliers.load_text(texts, tokenizer, 48, 4)
    ends = blocks == tokenizer.eos_token_id
    model = AutoModelForCausalLM.from_pretrained(STORIES, dtype=torch.float64)
    losses = []
    for ids, of_block in zip(blocks, ends, strict=True):
        with torch.no_grad():
            logits = model(ids[None], position_ids=positions_anew(ids, of_block), use_cache=False).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, ids[1:], reduction="none")[~of_block[:-1]])
    fields = {"models": [str(STORIES)], "text": texts, "block": 48, "blocks": 4, "stream": stream}
    whole, alone = (run(Cells(**fields, documents=documents), tmp_path)[0] for documents in (False, True))
    assert alone["value"] == pytest.approx(torch.cat(losses).mean().exp().item(), rel=1e-6) != whole["value"]
    assert alone["protocol"] == "first-blocks+documents" and alone["documents"] and "packed_blocks" not in alone
    assert whole["packed_blocks"] == int(ends[:, :-1].any(1).sum()) and "documents" not in whole


@pytest.mark.parametrize("bos", [False, True])
def test_sequences_of_documents(bos):
    """Each begins with the first token, if there is one; and one of a single token is none."""
    tokenizer = outliers.load_tokenizer(MODEL)
    end, first = [tokenizer.eos_token_id], [tokenizer.bos_token_id] if bos else []
    texts = [[11, 12, 13], [14], [15, 16, 17, 18, 19], [20, 21]]
    found = outliers.load_text([*map(torch.tensor, texts)], tokenizer, 4 + bos, 2, bos, documents=True)
    of_texts = [[11, 12, 13], *([[14]] if bos else []), [15, 16, 17, 18]]
    assert [ids.tolist() for ids in found] == [first + ids for ids in of_texts]
    packed = torch.tensor([[*end, 30, 31, *end, 32, 33], [34, 35, *end, 36, 37, 38]])
    starts = [[*end, 30, 31], [*end, 32, 33], [34, 35], [*end, 36, 37, 38]]
    assert [ids.tolist() for ids in outliers.load_text(packed, tokenizer, 6, documents=True)] == starts


@pytest.mark.parametrize("texts", [[[11, 12], [], [13, 14], []], [[], [11, 12], [13, 14]]])
def test_documents_without_tokens(texts):
    tokenizer, ids = outliers.load_tokenizer(MODEL), [torch.tensor(ids, dtype=torch.int64) for ids in texts]
    assert outliers.load_text(ids, tokenizer, 2).tolist() == [[11, 12], [13, 14]]
    assert [one.tolist() for one in outliers.load_text(ids, tokenizer, 4, documents=True)] == [[11, 12], [13, 14]]


def test_a_first_token_that_blocks_lack_is_said(tmp_path, caplog):
    caplog.set_level(logging.INFO, "outliers")
    model, first = prefixing(tmp_path / "model"), outliers.load_tokenizer(MODEL).bos_token
    fields = SMALL | {"models": [model]}
    (row,) = run(Cells(**fields), tmp_path / "rows")
    said = f"the tokenizer of '{model}' puts {first} before a text and blocks lack it; --bos begins each block with it"
    assert caplog.messages.count(said) == 1 and row["bos_left_out"] == first
    caplog.clear()
    (other,) = run(Cells(**SMALL), tmp_path / "rows")
    (begun,) = run(Cells(**fields, bos=True), tmp_path / "rows")
    assert "bos_left_out" not in {**other, **begun} and not [text for text in caplog.messages if "--bos" in text]


WRITTEN = ["fp32", "w4a4", "absmax"]


def parts_of(rows: list[dict], kind: str) -> list[dict]:
    return [row for row in rows if row["metric"] == f"token_losses.{kind}"]


def test_losses_of_tokens_are_those_of_float64(tmp_path):
    """Of each context that is listed; and so few tokens carry each share of the whole."""
    model, tokenizer = outliers.load_model(MODEL), outliers.load_tokenizer(MODEL)
    blocks = outliers.load_text("sample", tokenizer, 32, 3)
    before, after = (exact_losses(one, blocks) for one in (model, outliers.quantize(model, "w4a4")))
    increase = after - before
    rows = run(Cells(**SMALL, variants=["w4a4"], metrics=["token_losses"]), tmp_path)
    (total,) = parts_of(rows, "total")
    assert total["value"] == pytest.approx(increase.sum().item(), rel=1e-4)
    assert (total["tokens"], total["loss"]) == (3 * 31, pytest.approx(before.mean().item(), rel=1e-6))
    largest = increase.flatten().sort(descending=True).values
    contexts = parts_of(rows, "context")
    for row, want in zip(contexts, largest.tolist(), strict=False):
        place = row["sequence"], row["position"] - 1
        assert row["value"] == pytest.approx(want, abs=1e-4) == pytest.approx(increase[place].item(), abs=1e-4)
        assert row["loss"] == pytest.approx(before[place].item(), abs=1e-4)
        assert row["token"] == blocks[row["sequence"], row["position"]]
        around = tokenizer.decode(blocks[row["sequence"], max(0, row["position"] - 8) : row["position"]])
        assert row["around"].partition("«")[0].strip() == repr(around)[1:-1].strip()
    assert len(contexts) == 16
    carried = largest.cumsum(0)
    for row in parts_of(rows, "carriers"):
        assert row["value"] == 1 + (carried >= row["share"] * carried[-1]).tolist().index(True)


@pytest.mark.parametrize(
    ("model", "options"), [(MODEL, {"draws": 2}), ("pocket/bert-1.4m", {"mask_seed": 1}), ("pocket/t5-1.9m", {})]
)
def test_losses_of_tokens_add_up_to_the_difference_of_log_perplexities(tmp_path, model, options):
    """Times the number of tokens; so do those of all types, of all positions, and of all tokens."""
    spec = Cells(**SMALL | options | {"models": [model]}, variants=WRITTEN, metrics="perplexity,token_losses")
    rows = run(spec, tmp_path)
    losses = {
        row["variant"]: row["bits_per_byte"] * row["bytes"] * math.log(2)  # the mean over draws of their sums
        for row in rows
        if row["metric"] == "perplexity"
    }
    for name in WRITTEN:
        of_variant = [row for row in rows if row["variant"] == name]
        (total,) = parts_of(of_variant, "total")
        assert total["value"] == pytest.approx(losses[name] - losses["fp32"], rel=1e-9, abs=1e-9)
        if "draws" not in options:
            perplexity = next(row["value"] for row in of_variant if row["metric"] == "perplexity")
            assert total["tokens"] * math.log(perplexity) == pytest.approx(losses[name], rel=1e-12)
        for kind in ("type", "position", "token"):
            parts = parts_of(of_variant, kind)
            assert math.fsum(row["value"] for row in parts) == pytest.approx(total["value"], rel=1e-12, abs=1e-12)
            assert not parts or sum(row["tokens"] for row in parts) == total["tokens"]


def test_losses_of_tokens_are_means_over_mask_seeds(tmp_path):
    """Whose bytes are those of the seed, as bits per byte have them."""
    fields = {"models": ["pocket/bert-1.4m"], "block": 32, "blocks": 2, "variants": ["w4a4"]}
    of_seeds = [{"mask_seed": 0}, {"mask_seed": 1}, {"mask_seeds": 2}]
    found = [run(Cells(**fields, **seeds, metrics="perplexity,token_losses"), tmp_path) for seeds in of_seeds]
    first, second, both = (rows[0] for rows in found)
    assert first["bytes"] != second["bytes"] and both["bytes"] == first["bytes"] + second["bytes"]
    assert both["bits_per_byte"] == pytest.approx((first["bits_per_byte"] + second["bits_per_byte"]) / 2)
    first, second, both = (parts_of(rows, "total")[0] for rows in found)
    assert both["value"] == pytest.approx((first["value"] + second["value"]) / 2, rel=1e-9)
    masked = {row["position"]: row for row in parts_of(found[0], "context") if row["sequence"] == 0}
    tokenizer = outliers.load_tokenizer("pocket/bert-1.4m")
    labels = masked_text("sample", tokenizer, 32, 2).labels[0]
    assert masked and {at: row["token"] for at, row in masked.items()} == {at: int(labels[at]) for at in masked}
    assert not any(tokenizer.mask_token in row["around"] for row in masked.values())
    seen = {(row["sequence"], row["position"]): row["value"] for rows in found[:2] for row in parts_of(rows, "context")}
    assert parts_of(found[2], "context")[0]["value"] in [pytest.approx(value) for value in seen.values()]


def test_a_page_of_losses_of_tokens(tmp_path):
    """Findings come from draws, for a single one has no scatter."""
    single, drawn = (
        Cells(models=[MODEL], block=32, blocks=8, variants=["fp32", "w4a4"], metrics="token_losses", draws=draws)
        for draws in (1, 3)
    )
    sections = [show(spec, tmp_path, run(spec, tmp_path)) for spec in (single, drawn)]
    assert not sections[0].findings and "carry half" in sections[0].text
    rows = run(drawn, tmp_path)
    (half,) = (row["value"] for row in parts_of(rows, "carriers") if row["share"] == 0.5)
    text = sections[1].findings[0].text
    assert text.startswith(f"Under w4a4, {half:.0f} of 248 predicted tokens (") and " half of the increase" in text
    names = [table.name.rpartition("_gpt2")[0] for table in sections[1].tables]
    assert names == ["", "token_losses", *(f"losses_by_{kind}" for kind in ("type", "position", "token", "context"))]
    (drawing,) = sections[1].drawings
    assert drawing.name == "loss_by_position_gpt2-0.1m" and drawing.figure.axes[0].get_xlim()[0] > -1


@pytest.mark.parametrize(("deviation", "shared"), [(1.0, True), (5.0, False)])
def test_parts_of_an_increase_within_its_scatter_are_no_shares_of_it(deviation, shared):
    row = {"model": MODEL, "variant": "absmax", "value": 8.0, "standard_deviation": deviation, "tokens": 100}
    kinds = {"total": {}, "carriers": {"share": 0.5}, "type": {"type": "digit"}}
    rows = [row | {"metric": f"token_losses.{kind}"} | fields for kind, fields in kinds.items()]
    section = token_losses_section(rows)
    assert (section.text.count("100.0%"), bool(section.findings)) == (1 + shared, shared)


def test_pictures_have_no_losses_of_tokens(tmp_path):
    with pytest.raises(UserError, match=r"'pocket/vit-0\.3m' predicts no tokens, of which token_losses are; expected"):
        run(Cells(models=["pocket/vit-0.3m"], blocks=2, metrics="token_losses"), tmp_path)
