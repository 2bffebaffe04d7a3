"""Plans: the record, a scheme in the place of another, and models on disk that have several."""

import pytest
import torch

import outliers
from outliers import Quantized, UserError
from outliers.models.anatomy import projections
from outliers.quantization.int8 import Int8Linear

MODEL = "pocket/gpt2-0.1m"
IDS = torch.arange(1, 33)[None]


@pytest.fixture(scope="module")
def model():
    return outliers.load_model(MODEL)


@pytest.fixture(scope="module")
def paths(model):
    return [one.path for one in projections(model)]


def plan_of(paths, **fields):
    return outliers.Plan(**{"model": MODEL, "scheme": "absmax", "projections": len(paths), **fields})


def schemes_by_path(model):
    return {one.path: getattr(getattr(one.module, "scheme", None), "name", "fp32") for one in projections(model)}


def test_each_projection_has_the_scheme_that_the_plan_says(model, paths):
    plan = plan_of(paths, exact=paths[:1], instead={"llm.int8": paths[1:3]})
    with Quantized.of_plan(plan).on(model) as changed:
        found = schemes_by_path(changed)
    assert found == dict(zip(paths, ["fp32", "llm.int8", "llm.int8", *["absmax"] * (len(paths) - 3)], strict=True))


def test_a_skipped_projection_stays_exact_whatever_is_instead(model, paths):
    found = schemes_by_path(outliers.quantize(model, "absmax", skip=paths[:1], instead={"llm.int8": paths[:2]}))
    assert [found[path] for path in paths[:3]] == ["fp32", "llm.int8", "absmax"]


def test_a_file_is_read_as_it_was_written(paths, tmp_path):
    plan = plan_of(paths, exact=paths[:2], instead={"w4a8-g64": paths[2:3]}, measured={"cost": 0.0312, "draws": 4})
    plan.write(tmp_path / "plan.yaml")
    assert outliers.read_plan(tmp_path / "plan.yaml") == plan


def test_the_writing_of_a_variant_says_its_schemes(paths):
    written = f"absmax+skip={paths[0]}+instead=llm.int8@{paths[1]}+instead=(absmax+hadamard)@ffn_out"
    found = outliers.variant(written)
    assert found.name == written
    assert [scheme.name for scheme, _ in found.instead] == ["llm.int8", "absmax+hadamard"]


def test_a_variant_and_a_skip_are_read_from_a_file(paths, tmp_path):
    file = tmp_path / "a" / "plan.yaml"
    file.parent.mkdir()
    plan_of(paths, exact=paths[:2]).write(file)
    assert outliers.variant(f"@{file}") == Quantized(outliers.SCHEMES["absmax"], tuple(paths[:2]))
    assert outliers.variant(f"llm.int8+skip=@{file}").skip == tuple(paths[:2])
    assert outliers.Sweep(models=[MODEL], skip=[f"@{file}", "attn_in"]).skip == [*paths[:2], "attn_in"]


def test_rows_say_what_is_instead(model, paths):
    fields = outliers.variant(f"w8a8-g8+instead=w4a8-g8@{paths[1]}").fields(model)
    sizes = {one.path: one.module.weight.numel() for one in projections(model)}
    share = sizes[paths[1]] / sum(sizes.values())
    assert fields["instead"] == [f"w4a8-g8@{paths[1]}"]
    assert fields["weight_bits"] == pytest.approx(8 - 4 * share + 16 / 8, abs=1e-3)  # and a scale for 8 values


def test_an_int8_model_of_several_schemes_is_read_back(model, paths, tmp_path):
    instead = {"llm.int8": paths[1:3], "zeropoint": paths[4:5]}
    kept = outliers.quantize(model, "absmax", keep="int8", skip=paths[:1], instead=instead)
    outliers.save_quantized(kept, tmp_path)
    read = outliers.load_quantized(tmp_path)
    assert schemes_by_path(read) == schemes_by_path(kept)
    assert sum(isinstance(one.module, Int8Linear) for one in projections(read)) == len(paths) - 1
    with torch.no_grad():
        assert torch.equal(read(IDS).logits, kept(IDS).logits)


@pytest.mark.parametrize(
    ("content", "said"),
    {
        "scheme: absmax": "field 'model' is missing",
        "[1, 2]": "it has no fields",
        "{model: a, scheme: absmax, projections: 3, color: red}": "field 'color'",
        "{model: a, scheme: absmax, projections: 3, exact: model.layers}": "field 'exact'",
        "a: &x [1]\nb: *x": "refers to itself by an alias",
        "a: [": "cannot read the plan",
        "!!python/object/apply:os.system [ls]": "cannot read the plan",
    }.items(),
)
def test_another_file_is_no_plan(content, said, tmp_path):
    (tmp_path / "plan.yaml").write_text(content)
    with pytest.raises(UserError, match=said) as found:
        outliers.read_plan(tmp_path / "plan.yaml")
    assert "expected what `python -m outliers.plan` writes" in str(found.value)


@pytest.mark.parametrize(
    ("instead", "said"),
    [
        ({"fp32": ["ffn_out"]}, "scheme 'fp32' in the place of 'absmax'"),
        ({"absmax+smoothing": ["ffn_out"]}, "without a calibration"),
        ({"llm.int8": ["ffn_out"], "zeropoint": ["transformer.h.0"]}, "has two schemes"),
        ({"llm.int8": ["model.x"]}, "unknown place in instead 'model.x'"),
        ({"w8a8-g64": ["ffn_out"]}, "groups of 64 features"),
    ],
)
def test_a_scheme_that_does_not_fit_is_refused(instead, said, model):
    with pytest.raises(UserError, match=said):
        outliers.quantize(model, "absmax", instead=instead)
