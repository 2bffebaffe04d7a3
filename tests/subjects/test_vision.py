"""Vision transformers: states and losses beside those of transformers, pictures by place, pictures at the door."""

import math
import os
import re
import shutil

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from datasets import Image as Column
from PIL import Image
from transformers import AutoConfig, AutoModel, ViTImageProcessorPil

import outliers
from outliers import Cells, UserError, plant, run
from outliers.commands.ablate import Ablation
from outliers.commands.damage import Damage
from outliers.commands.emergence import Emergence
from outliers.commands.sweep import Sweep
from outliers.commands.trace import Tracing
from outliers.config.experiment import Experiment
from outliers.models.anatomy.examples import IGNORED, Examples
from outliers.models.load import load_config, load_processor
from outliers.runs.run import show
from outliers.subjects.causal import ModelWithText
from outliers.subjects.served import Served
from outliers.subjects.vision import pictures
from tests.subjects.test_families import SIZES, VIT, make
from tests.typed import call

# Kind to what stands before the patches.
BEFORE = {"vit": ["[CLS]"], "deit": ["[CLS]", "[DIST]"], "dinov2": ["[CLS]"], "dinov2-gated": ["[CLS]"]}
BEFORE |= {"registers": ["[CLS]", *(f"register {number}" for number in range(4))], "clip": ["[CLS]"], "siglip": []}
PATCHES = [f"patch {row},{column}" for row in range(4) for column in range(4)]


@pytest.fixture
def vit():
    return make("vit")


@pytest.fixture
def shown():
    """Four pictures with their classes."""
    generator = torch.Generator().manual_seed(1)
    return Examples(torch.randn(4, 3, 16, 16, generator=generator), torch.tensor([[1], [2], [0], [4]]))


def save_pictures(folder, count=6, size=(20, 24)):
    folder.mkdir(parents=True)
    for number in range(count):
        noise = np.random.default_rng(number).integers(0, 255, (*size, 3), dtype=np.uint8)
        Image.fromarray(noise).save(folder / f"{number}.png")


@pytest.fixture
def saved(tmp_path, vit):
    """A model on disk with its image processor, and pictures by class."""
    vit.save_pretrained(tmp_path / "vit")
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(tmp_path / "vit")
    for name in ("Tabby cat", "dog", "sea bird", "4"):
        save_pictures(tmp_path / "pictures" / name)
    return tmp_path


@pytest.mark.parametrize("kind", BEFORE)
def test_places_have_names(kind, shown):
    found = outliers.trace(make(kind), shown, tokens=True)
    names = [*BEFORE[kind], *PATCHES]
    assert (found.block, [found.names[number][0] for number in range(len(names))]) == (len(names), names)
    sinks = found.statistics["attention.sinks"]
    assert torch.equal(found.statistics["attention.sinks_tokens"], sinks.sum(0)), "a place is a position here"


def test_a_folder_of_pictures_is_typed(monkeypatch, capsys, saved):
    options = ("--text", saved / "pictures", "--blocks", 2, "--scheme", "fp32", "--out", saved / "out")
    code, out, err = call(monkeypatch, capsys, "--model", saved / "vit", *options)
    assert code == 0 and "2 pictures" in out, err


def test_map_over_the_picture():
    """Each panel has the largest values of a feature by row and column; a trace without places has none."""
    model = plant(make("registers"), [3, 17], 64.0)
    shown = Examples(torch.randn(3, 3, 8, 12), torch.tensor([[0], [1], [2]]))
    trace = outliers.trace(model, shown, tokens=True)
    patches = [f"patch {row},{column}" for row in range(2) for column in range(3)]
    assert [name for _, (name, _) in sorted(trace.names.items())] == [*BEFORE["registers"], *patches]
    panels = outliers.plot.patch_map(trace)
    features = trace.outlier_features()["feature"].tolist()
    assert sorted(features)[:2] == [3, 17] and len(panels) == len(features)
    high = max(trace.statistics[f"{role}.magnitude"][:, features].max().item() / 3 for role in ("attn_in", "ffn_in"))
    for axes, feature in zip(panels, features, strict=True):
        assert axes.images[0].get_clim() == (0, pytest.approx(high)), "one scale for all"
        drawn_values = torch.as_tensor(axes.images[0].get_array())
        of_roles = [trace.statistics[f"{role}.magnitude"][:, feature] / 3 for role in ("attn_in", "ffn_in")]
        assert torch.allclose(drawn_values, torch.maximum(*of_roles)[5:].reshape(2, 3))
        assert "register 0" in axes.get_title(loc="left")
    with pytest.raises(UserError, match="the trace knows no patches"):
        outliers.plot.patch_map(outliers.trace(model, shown))


@pytest.mark.parametrize(
    ("kind", "picture", "message"),
    [
        ("vit", torch.zeros(3, 12, 12), "12 x 12 pixels; the model takes pictures of 16 x 16"),
        ("registers", torch.zeros(3, 10, 12), "10 x 12 pixels; expected multiples of 4, at most 16"),
        ("vit", torch.zeros(1, 16, 16), r"expected float32 pixel values \(3, height, width\)"),
        ("vit", torch.zeros(16, dtype=torch.int64), "expected float32 pixel values"),
    ],
)
def test_what_is_no_picture_of_a_model(kind, picture, message):
    with pytest.raises(UserError, match=message):
        outliers.perplexity(make(kind), Examples(picture[None], torch.tensor([[0]])))


def test_folder_by_class(saved):
    name = str(saved / "vit")
    processor, config = load_processor(name), load_config(name)
    found = pictures(saved / "pictures", processor, config, 12)
    assert found.ids.shape == (12, 3, 16, 16) and found.ids.dtype == torch.float32
    assert {*found.labels.flatten().tolist()} == {0, 1, 2, 4}, "the first ones are of all classes"
    assert torch.equal(pictures(saved / "pictures", processor, config, 5).ids, found.ids[:5])
    file = saved / "pictures" / "dog" / "0.png"
    expected = processor(images=Image.open(file), return_tensors="pt")["pixel_values"][0]
    every = pictures(saved / "pictures", processor, config)
    assert (every.ids[(every.labels == 1)[:, 0]] == expected).all((1, 2, 3)).sum() == 1


def test_data_set_of_the_hub(saved, monkeypatch):
    """Its bytes are opened at the same door, in its own order; classes go by their names."""
    file = saved / "pictures" / "dog" / "0.png"
    kinds = Features({"picture": Column(), "kind": ClassLabel(names=["dog", "owl"])})
    contents = [file.read_bytes(), file.read_bytes(), b"no picture"]
    rows = Dataset.from_dict(
        {"picture": [{"bytes": one, "path": None} for one in contents], "kind": [0, 1, 0]}, features=kinds
    )
    monkeypatch.setattr("outliers.text.documents.data_set", lambda _name, _splits: rows.to_iterable_dataset())
    processor, config = load_processor(str(saved / "vit")), load_config(str(saved / "vit"))
    found = pictures("owner/name", processor, config, 2)
    assert found.labels.flatten().tolist() == [1, 3]
    expected = processor(images=Image.open(file), return_tensors="pt")["pixel_values"][0]
    assert torch.equal(found.ids[1], torch.as_tensor(expected))
    with pytest.raises(UserError, match="'row 2 of owner/name' is not a readable picture"):
        pictures("owner/name", processor, config, 3)


def rename_all(folder):
    for file in folder.rglob("*.png"):
        file.rename(file.with_suffix(".txt"))


SPOILED = {  # what is done to a folder of pictures, of which one is the first, and what is said
    "no picture": (
        lambda _, first: first.write_bytes(b"GIF89a"),
        "dog/0.png' is not a readable picture: it is none of BMP, ",
    ),
    "cut": (lambda _, first: first.write_bytes(first.read_bytes()[:200]), "dog/0.png' is not a readable picture: "),
    "huge": (lambda _, first: Image.new("1", (9000, 9000)).save(first), "9,000 x 9,000 pixels, more than"),
    "pipe": (lambda _, first: first.unlink() or os.mkfifo(first), "is not a regular file"),
    "class": (lambda folder, _: (folder / "dog").rename(folder / "wolf"), "class 'wolf' is none of the 5 that"),
    "beside": (lambda folder, first: shutil.copy(first, folder / "lonely.png"), "pictures beside folders of pictures"),
    "empty": (lambda folder, _: rename_all(folder), "holds no pictures; expected files that end in .jpg"),
    "absent": (lambda folder, _: folder.rename(folder.with_name("gone")), "is not a folder; a vision model reads"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_bad_pictures(saved, case):
    spoil, message = SPOILED[case]
    spoil(saved / "pictures", saved / "pictures" / "dog" / "0.png")
    with pytest.raises(UserError, match=message):
        ModelWithText(str(saved / "vit"), None, Experiment(name="x", text=str(saved / "pictures"), blocks=24)).prepare()


@pytest.mark.parametrize(
    ("kind", "option", "message"),
    [
        (ModelWithText, {"bos": True}, "leave --bos out"),
        (ModelWithText, {"blocks": 25}, "has 24 pictures, not 25"),
        (ModelWithText, {"blocks": 3}, ""),
        (ModelWithText, {"block": 64}, "leave --block out"),
        (Served, {"blocks": 3, "block": 64}, ""),
    ],
)
def test_subject(saved, kind, option, message):
    subject = kind(str(saved / "vit"), None, Experiment(name="x", text=str(saved / "pictures"), **option))
    if message:
        with pytest.raises(UserError, match=message):
            subject.prepare()
    else:
        assert subject.blocks.shape == (3, 3, 16, 16)


def test_processor_of_a_hostile_model(saved):
    file = saved / "vit" / "preprocessor_config.json"
    file.write_text(file.read_text().replace('"height": 16', '"height": 1000000'))
    with pytest.raises(UserError, match="asks for height 1000000"):
        load_processor(str(saved / "vit"))


@pytest.mark.parametrize(
    ("kind", "fields"), [("dinov2", SIZES), ("clip_vision_model", VIT), ("siglip_vision_model", VIT)]
)
def test_tower_without_a_classifier(saved, kind, fields):
    """It is traced, and its projections have errors; what needs a class is refused in a line."""
    name, text = str(saved / "tower"), str(saved / "pictures")
    torch.manual_seed(0)
    made = AutoModel.from_config(AutoConfig.for_model(kind, **fields)).eval()
    made.save_pretrained(name)
    ViTImageProcessorPil(size={"height": 16, "width": 16}).save_pretrained(name)
    loaded, shown = outliers.load_model(name), torch.randn(1, 3, 16, 16)
    state = next(outliers.hidden_states(loaded, Examples(shown, torch.tensor([[IGNORED]])), 1))
    assert torch.equal(state, made(shown, output_hidden_states=True).hidden_states[2][0])
    rows = run(Tracing(name="trace", model=name, text=text, blocks=3), out=saved / "trace")
    assert any(row["metric"] == "count" for row in rows) and not any(row["metric"] == "perplexity" for row in rows)
    asked = Damage(name="damage", model=name, text=text, blocks=3, by=["error"], schemes=["absmax"])
    errors = [row["value"] for row in run(asked, out=saved / "damage") if row["metric"] == "damage.error"]
    assert len(errors) == 18 and all(0 < error < 0.1 for error in errors)
    rows = run(Sweep(models=[name], text=text, blocks=3, schemes=["absmax"]), out=saved / "sweep")
    assert any(row.get("failed", "").startswith("the model has no classifier") for row in rows)


def test_sweep_with_and_without_classes(saved):
    save_pictures(saved / "flat")
    name, found = str(saved / "vit"), {}
    for text in ("pictures", "flat"):
        spec = Sweep(models=[name], text=str(saved / text), blocks=5, schemes=["fp32", "absmax"])
        rows = run(spec, out=saved / f"sweep-{text}")
        found[text] = {(row["metric"], row["scheme"]): row["value"] for row in rows}
        assert all(row["protocol"] == "pictures" for row in rows)
        assert re.search("top-1", show(spec, saved / f"sweep-{text}", rows).text)
    by_class, without = found["pictures"], found["flat"]
    assert by_class["accuracy.loss", "absmax"] == pytest.approx(math.log(by_class["perplexity", "absmax"]))
    model, config = outliers.load_model(name), load_config(name)
    shown = pictures(saved / "pictures", load_processor(name), config, 5)
    right = sum(model(one.ids[None]).logits.argmax().item() == one.labels.item() for one in shown)
    assert by_class["accuracy", "fp32"] == right / 5
    assert without["damage.top1_agreement", "fp32"] == 1 and without["damage.kl", "absmax"] > 0
    assert not any(metric == "perplexity" for metric, _ in without)


@pytest.mark.parametrize("spec", [Cells, Damage, Ablation, Emergence])
def test_perplexity_of_pictures_without_classes(saved, tmp_path, spec):
    save_pictures(tmp_path / "flat")
    name = str(saved / "vit")
    model = {"models": [name]} if "models" in spec.model_fields else {"model": name}
    with pytest.raises(UserError, match=r"has no classes that '.*vit' predicts"):
        run(spec(**model, text=str(tmp_path / "flat"), blocks=5), tmp_path / "out")
