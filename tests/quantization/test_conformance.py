"""Every scheme and every remedy: written and read, on a streamed model, as codes on disk, and in a sweep."""

import pickle
from functools import cache
from pathlib import Path

import pytest
import torch
from outlier_kernels.formats import FORMATS

from outliers import SCHEMES, Quantized, Sweep, UserError, calibrate, perplexities, perplexity, quantize, sweep
from outliers.criterion import ROUTER
from outliers.models.load import load_model
from outliers.models.stream import stream_model
from outliers.quantization.remedies import REMEDIES, SEARCH
from outliers.quantization.schemes import get_scheme, parse_grouped, read_scheme, write_scheme
from outliers.quantization.store import load_int8, load_quantized, save_quantized
from outliers.text.blocks import tokens_hash
from tests.conftest import in_turn, slow_but
from tests.small_models import make_model, sample_blocks

MODEL = "pocket/gpt2-0.1m"
NAMES = [(parse_grouped(f"{name}-g16") or SCHEMES[name]).name for name in SCHEMES if name != "fp32"]
NUMBERS = {"tokens": "=3", "clip": "=0.9", "activations": "=8", "rotation": "=2"}  # which change a small model
GRIDS = [name for name, kind in REMEDIES.items() if kind.number and kind.number.grid and kind.number.default != SEARCH]
REMEDIED = [f"w4a4-g8+{name}{NUMBERS.get(name, '')}" for name in REMEDIES if name != ROUTER]
REMEDIED += [f"w4a4-g8+{name}={SEARCH}" for name in GRIDS]
TOGETHER = ["w4a8+smoothing+awq=0.5+hadamard+clip=0.9+gptq", "absmax-vector+attention=0.1@scores"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The folder of a small model by its architecture, and the model resident and streamed."""

    @cache
    def save(case: str) -> tuple:
        folder = str(tmp_path_factory.mktemp(case))
        make_model(case).save_pretrained(folder)
        return folder, load_model(folder), stream_model(folder)

    return save


def check(name: str, folder: str, resident, streamed, blocks: torch.Tensor, place: Path) -> None:
    """Check a scheme on the model of a folder; what is saved goes to another place."""
    scheme = get_scheme(name)
    assert read_scheme(write_scheme(scheme)) == pickle.loads(pickle.dumps(scheme)) == scheme
    exact, of_text = perplexity(resident, blocks), lambda model: calibrate(model, blocks, [scheme])
    known = of_text(resident) if scheme.needs_calibration else None
    changed = quantize(resident, scheme, calibration=known)
    expected = perplexity(changed, blocks)
    assert 0 < abs(expected / exact - 1) < 0.1
    assert perplexity(resident, blocks) == exact, "the original is as it was"
    if scheme.learns:
        with pytest.raises(UserError, match="learns with the whole model, whose weights are not in memory"):
            of_text(streamed)
    else:
        variant = Quantized(scheme, calibration=of_text(streamed) if scheme.needs_calibration else None)
        variant = pickle.loads(pickle.dumps(variant))
        assert perplexities(streamed, blocks, [variant]) == [pytest.approx(expected)]
    reason = cannot_keep(scheme)
    for keep in (lambda: quantize(resident, scheme, "int8", calibration=known), lambda: load_int8(folder, scheme)):
        if reason:
            with pytest.raises(UserError, match=reason):
                keep()
    if reason:
        return
    small = quantize(resident, scheme, "int8", calibration=known)
    logits, expected = small(blocks).logits, changed(blocks).logits
    assert (logits - expected).norm() < 0.01 * expected.norm(), "but for codes of activations that flip"
    save_quantized(small, place)
    assert torch.equal(small(blocks).logits, logits), "saving leaves it as it was"
    assert torch.equal(load_quantized(place)(blocks).logits, logits)
    assert torch.equal(load_int8(folder, scheme, calibration=known)(blocks).logits, logits)


def cannot_keep(scheme) -> str | None:
    """Why there is no int8 model under a scheme."""
    if scheme.weights is None:
        return "quantizes no "
    if scheme.remedies_with("around"):
        return "multiplies some tokens with exact weights"
    if not FORMATS[scheme.weights.format].integers:
        return rf"has weights in {scheme.weights.format}, whose codes are no int8; expected int8 or int6 .*keep='exact'"
    return None


@in_turn("name case", NAMES, ["gpt2", "opt-350m", "falcon"])
def test_every_scheme(name, case, saved, blocks, tmp_path):
    check(name, *saved(case), blocks, tmp_path)


@pytest.mark.parametrize("name", slow_but([*REMEDIED, *TOGETHER], ["w4a4-g8+hadamard", "w4a4-g8+tokens=3"]))
def test_every_remedy(name, saved, blocks, tmp_path):
    check(name, *saved("llama"), blocks, tmp_path)


@pytest.mark.parametrize("name", slow_but(REMEDIED, ["w4a4-g8+gptq"]))
def test_every_remedy_in_a_sweep(name, tmp_path):
    """Rows have the number that calibrating and quantizing by hand has."""
    asked = Sweep(models=[MODEL], block=32, blocks=2, schemes=[name])
    (row,) = sweep(asked, tmp_path)
    scheme, text, model = get_scheme(name), sample_blocks(MODEL, 32, 6), load_model(MODEL)
    known = calibrate(model, text[2:], [scheme])
    assert row["scheme_parts"].endswith(f", exact, {scheme.remedies[0]}")
    assert row.get("calibration_hash") == (tokens_hash(text[2:]) if scheme.needs_calibration else None)
    assert row["value"] == perplexity(quantize(model, scheme, calibration=known), text[:2])
    assert sweep(asked, tmp_path) == [row], "found again"
