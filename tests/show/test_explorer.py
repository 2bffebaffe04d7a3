"""The explorer of a page, in a real browser; and the excerpt of the text that it shows."""

import base64
import gzip
import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from outliers import Trace, UserError, load_model, run, trace
from outliers.commands.damage import Damage
from outliers.commands.origins import Account
from outliers.commands.trace import Tracing
from outliers.paper.report import experiments_of
from outliers.runs.traces import EXCERPT
from outliers.show.explorer import CELLS, Explorer, map_of, plotly
from outliers.show.page import page
from outliers.show.section import Context, Section
from outliers.tracing.excerpt import FEATURES, VALUES, Excerpt, excerpt, features_to_show
from outliers.views.damage import damage_rows_section
from outliers.views.origins import WRITERS_SHOWN, origins_explorer, origins_section
from outliers.views.trace import magnitudes, trace_rows_section
from tests.conftest import needs_chromium
from tests.kept import kept
from tests.show import test_page
from tests.small_models import make_model

MODEL = "pocket/gpt2-0.5m"
SMALL = {"model": MODEL, "block": 64, "blocks": 2}
DRAWN = "[...document.querySelectorAll('.explorer')].every(one => 'drawn' in one.dataset)"


# The excerpt


@pytest.fixture(scope="module")
def traced(tmp_path_factory) -> tuple[Tracing, Path, list[dict]]:
    """The trace of a small model, in its folder."""
    spec, folder = Tracing(**SMALL), tmp_path_factory.mktemp("trace")
    return spec, folder, run(spec, folder)


def test_the_excerpt_holds_what_the_layers_read(traced):
    found = Excerpt.load(traced[1] / EXCERPT)
    model = load_model(MODEL)
    states = model.transformer(found.tokens[None], output_hidden_states=True).hidden_states
    for layer, block in enumerate(model.transformer.h):
        expected = block.ln_1(states[layer])[0][:, found.features["attn_in"]]
        torch.testing.assert_close(found.values["attn_in"][layer].float(), expected, rtol=2**-8, atol=1e-6)


def test_it_is_of_the_telling_features(traced):
    found, of = Excerpt.load(traced[1] / EXCERPT), Trace.load(traced[1] / "trace")
    assert found.labels == of.labels
    assert {role: some.tolist() for role, some in found.features.items()} == features_to_show(of)
    assert found.features["attn_in"].tolist() == found.features["ffn_in"].tolist()
    largest = of.largest("ffn_out").amax(0).sort(descending=True).indices[:FEATURES]
    assert set(found.features["ffn_out"].tolist()) >= set(largest[:3].tolist())


def test_outlier_features_come_first():
    model, blocks = make_model("llama"), torch.randint(100, (3, 24), generator=torch.Generator().manual_seed(1))
    found = trace(model, blocks, alpha=0.5)
    outliers = found.outlier_features()["feature"].tolist()
    assert outliers
    assert features_to_show(found)["attn_in"][: len(outliers)] == outliers[:FEATURES]


def test_its_size_is_bounded(traced):
    of = Trace.load(traced[1] / "trace")
    deep = replace(of, block=2048, modules={}, statistics=of.statistics | {"residual.largest": torch.zeros(80, 5)})
    assert {len(some) for some in features_to_show(deep).values()} == {VALUES // (4 * 80 * 256)}
    assert {len(some) for some in features_to_show(of).values()} == {FEATURES}


def test_a_finished_trace_gets_its_excerpt_and_keeps_it(traced):
    spec, folder, _ = traced
    before = (folder / EXCERPT).read_bytes()
    (folder / EXCERPT).write_bytes(before[:100])
    run(spec, folder)
    assert (folder / EXCERPT).read_bytes() == before, "a damaged one is made again"
    written = (folder / EXCERPT).stat().st_mtime_ns
    run(spec, folder)
    assert (folder / EXCERPT).stat().st_mtime_ns == written


def test_a_streamed_model_reads_its_layers_no_further_time(tmp_path):
    spec = Tracing(**SMALL, stream=True)
    rows = run(spec, tmp_path)
    assert not (tmp_path / EXCERPT).exists()
    section = trace_rows_section(rows, Context(spec, tmp_path))
    assert section.explorers[0].content["tokens"] is None


def test_an_excerpt_whose_parts_do_not_fit(tmp_path):
    model = load_model(MODEL)
    found = excerpt(model, torch.arange(8), {"attn_in": [0, 1]})
    Excerpt(found.tokens[:4], found.features, found.values).save(tmp_path / EXCERPT)
    with pytest.raises(UserError, match="for 4 tokens and 2 features"):
        Excerpt.load(tmp_path / EXCERPT)


# The data


def unpacked(data: str) -> dict:
    """What `Explorer.packed` packs."""
    return json.loads(gzip.decompress(base64.b64decode(data)))


def test_numbers_are_kept_as_they_are_shown():
    values = np.array([[0.01234567, 0.126, 6.549], [-31.74, 3163.4, 2.5e6], [np.nan, -np.inf, np.inf]])
    shown = [[0.0123, 0.13, 6.55], [-31.7, 3163.0, 2.5e6], [None, "−∞", "∞"]]
    assert unpacked(Explorer("", {"one": values, "two": "x"}).packed) == {"one": shown, "two": "x"}


def test_wide_models_share_columns():
    values = np.arange(CELLS * 3.0).reshape(3, CELLS)
    found = map_of("", "feature", values)
    assert found["share"] == 3
    assert found["values"].shape == (3, CELLS // 3)
    assert found["values"][0, 1] == values[0, 3:6].max()


def test_the_maps_are_those_of_the_trace(traced):
    spec, folder, rows = traced
    found = unpacked(trace_rows_section(rows, Context(spec, folder)).explorers[0].packed)
    of = Trace.load(folder / "trace")
    assert [one["name"] for one in found["maps"]] == list(of.roles)
    for one in found["maps"]:
        np.testing.assert_allclose(one["values"], of.largest(one["name"]).numpy(), atol=0.005)
    assert found["positions"].keys() == {"stream"}
    np.testing.assert_allclose(found["positions"]["stream"]["values"], magnitudes(of).numpy(), atol=0.005)
    assert len(found["tokens"]) == SMALL["block"]


@pytest.fixture(scope="module")
def of_smollm2() -> dict:
    """The explorer of the kept origins."""
    rows = pd.DataFrame(kept("mechanism/smollm2-135m"))
    return origins_explorer(rows, "smollm2-135m", {}).content


def test_writers_of_a_part_add_up_to_it(of_smollm2):
    for part in (part for one in of_smollm2["features"] for part in one["parts"]):
        assert np.sum([one["values"] for one in part["writers"]], 0) == pytest.approx(part["values"], rel=1e-2, abs=0.1)
        assert len(part["writers"]) <= 2 * WRITERS_SHOWN + 1


def test_the_explorer_of_origins_says_what_rows_say(of_smollm2):
    one = of_smollm2["features"][1]
    part = next(part for part in one["parts"] if (part["layer"], part["part"]) == (11, "feed-forward"))
    neuron = max(part["writers"], key=lambda writer: writer["values"][1])
    gates = [gate for gate in one["gates"] if gate["layer"] == 11]
    assert (one["feature"], part["values"][1], len(one["states"])) == (507, 21024, 31)
    assert (neuron["name"], neuron["values"][1], len(neuron["most"])) == ("neuron 1229", 15735, 3)
    assert [gate["part"] for gate in gates] == ["attention", "feed-forward"]
    assert len(Explorer("", of_smollm2).packed) < 100_000


# The page


@pytest.fixture(scope="module")
def path(traced, tmp_path_factory) -> Path:
    """A page with all explorers, whose model has a name and whose text a token that HTML must not take as its own."""
    spec, folder, rows = traced
    damage = Damage(**SMALL, by=["error"], schemes=["absmax", "llm.int8"])
    others = (damage, Account(**SMALL, by=["writers"]))
    of_damage, of_origins = (run(one, tmp_path_factory.mktemp(one.name)) for one in others)
    first = trace_rows_section(rows, Context(spec, folder))
    content = first.explorers[0].content
    tokens = ["<script>alert(1)</script>", *content["tokens"][1:]]
    first = first._replace(explorers=[first.explorers[0]._replace(content=content | {"tokens": tokens})])
    found = tmp_path_factory.mktemp("page") / "report.html"
    sections = [first, damage_rows_section(of_damage, Context(damage, folder)), origins_section(of_origins)]
    found.write_text(page("A look", sections, "python -m outliers.report look"), encoding="utf-8")
    return found


@contextmanager
def drawn_page(browser, path):
    """The page in a window, drawn."""
    with test_page.opened(browser, path) as window:
        window.wait_for_function(DRAWN)
        yield window


@pytest.fixture
def opened(browser, path):
    with drawn_page(browser, path) as window:
        yield window


@pytest.fixture(scope="module")
def untouched(browser, path):
    """One window of all tests that choose nothing in it."""
    with drawn_page(browser, path) as window:
        yield window


def output(window, number: int = 1) -> str:
    """What the explorer says of the chosen cell."""
    return window.locator(f"#explorer-{number} output").inner_text()


def in_sight(node) -> dict:
    """Where something is in the window, scrolled to."""
    node.scroll_into_view_if_needed()
    return node.bounding_box()


def enter(section, name: str, number: int) -> None:
    """Type a number into a field."""
    section.locator(f"[name={name}]").fill(str(number))
    section.locator(f"[name={name}]").press("Enter")


@needs_chromium
def test_what_is_chosen_is_shown(opened, traced):
    section = opened.locator("#explorer-1")
    section.locator("[name=map]").select_option(label="ffn_out: into the feed-forward output")
    enter(section, "row", 2)
    enter(section, "column", 7)
    said = output(opened)
    assert said.startswith("layer 2, feature 7 of ffn_out: ")
    largest = Trace.load(traced[1] / "trace").largest("ffn_out")[2, 7].item()
    assert float(said.rpartition(" ")[2].replace(",", "")) == pytest.approx(largest, abs=0.006)
    legends = {"linear": "Colour: largest |x|, with a step", "clipped": "clipped at ", "log": "log scale"}
    for scale, legend in legends.items():
        section.locator("[name=scale]").select_option(scale)
        assert legend in section.locator("[data-part=legend]").inner_text()
    opened.locator("#explorer-2 [name=map]").select_option(label="llm.int8, mean over tokens")
    assert output(opened, 2).endswith(" dB")
    assert " of llm.int8, mean over tokens: " in output(opened, 2)


@needs_chromium
def test_the_damage_map_begins_at_the_largest_error(untouched):
    assert " of absmax, mean over tokens: " in output(untouched, 2)
    largest, chosen = untouched.evaluate(
        """() => {
            const z = document.querySelector('#explorer-2 .map').data[0].z;
            const chosen = name => +document.querySelector(`#explorer-2 [name=${name}]`).value;
            return [Math.max(...z.flat()), z[chosen('row')][chosen('column')]];
        }"""
    )
    assert chosen == largest


@needs_chromium
def test_arrow_keys_move_the_chosen_cell(opened):
    section = opened.locator("#explorer-1")
    enter(section, "column", 5)
    enter(section, "row", 1)
    section.locator(".map").focus()
    for key, place in (
        ("ArrowRight", "layer 1, feature 6"),
        ("ArrowDown", "layer 2, feature 6"),
        ("ArrowLeft", "layer 2, feature 5"),
        ("ArrowUp", "layer 1, feature 5"),
    ):
        opened.keyboard.press(key)
        assert output(opened).startswith(f"{place} of attn_in: ")
    for _ in range(5):
        opened.keyboard.press("ArrowUp")
    assert output(opened).startswith("layer 0, "), "it stays on the map"


@needs_chromium
def test_every_control_is_reached_by_keys(untouched):
    untouched.locator("#explorer-1 [name=map]").focus()
    names = []
    while "map js-plotly-plot" not in names and len(names) < 40:
        names.append(untouched.evaluate("document.activeElement.name || document.activeElement.className"))
        outline = untouched.evaluate("getComputedStyle(document.activeElement).outlineStyle")
        assert outline != "none", "focus is visible"
        untouched.keyboard.press("Tab")
    assert {"map", "scale", "row", "column", "in", "out", "whole", "map js-plotly-plot"} <= set(names)


@needs_chromium
def test_zooming(opened):
    def across() -> float:
        low, high = opened.evaluate("document.querySelector('#explorer-1 .map').layout.xaxis.range")
        return high - low

    section = opened.locator("#explorer-1")
    whole = across()
    section.get_by_role("button", name="Zoom in").click()
    assert across() == pytest.approx(whole / 2)
    section.get_by_role("button", name="Zoom out").click()
    assert across() == pytest.approx(whole)
    section.get_by_role("button", name="Zoom in").click()
    section.get_by_role("button", name="Whole map").click()
    assert across() == pytest.approx(whole)


@needs_chromium
def test_the_text_by_a_feature(opened, traced):
    found = Excerpt.load(traced[1] / EXCERPT)
    feature = found.features["attn_in"][1].item()
    opened.locator("#explorer-1 .marked").get_by_role("button", name=str(feature), exact=True).click()
    assert f"feature {feature} of attn_in" in output(opened)
    tokens = opened.locator("#explorer-1 .tokens span")
    assert tokens.count() == len(found.tokens)
    assert tokens.first.inner_text() == "<script>alert(1)</script>"
    layer = int(opened.locator("#explorer-1 [name=row]").input_value())
    value = found.values["attn_in"][layer, 3, 1].item()
    said = tokens.nth(3).get_attribute("title").removeprefix("position 3: ").replace("−", "-")
    assert float(said) == pytest.approx(value, abs=0.006)
    other = next(one for one in range(100) if one not in found.features["attn_in"].tolist())
    enter(opened.locator("#explorer-1"), "column", other)
    assert f"feature {other} is none of them" in opened.locator("#explorer-1 [data-part=text]").inner_text()


@needs_chromium
def test_clicking_a_cell_chooses_it(opened):
    box = in_sight(opened.locator("#explorer-1 .map .nsewdrag"))
    opened.mouse.click(box["x"] + box["width"] * 0.25, box["y"] + box["height"] - 4)
    layers = opened.evaluate("document.querySelector('#explorer-1 .map').data[0].z.length")
    opened.wait_for_function(f"document.querySelector('#explorer-1 output').value.startsWith('layer {layers - 1}, ')")


@needs_chromium
def test_who_writes_is_shown(opened, path):
    """By the largest part, by a click, by the arrow keys and by what is chosen in a list."""
    section = opened.locator("#explorer-3")
    heading, writers = section.locator("[data-part=heading]"), section.locator("tbody tr")
    said = output(opened, 3)
    assert " writes " in said and "; the state goes from " in said
    of_part = heading.inner_text()
    assert writers.count() > 0
    assert "position" in writers.first.inner_text()
    section.locator(".map").focus()
    opened.keyboard.press("ArrowRight")
    assert heading.inner_text() != of_part
    opened.keyboard.press("ArrowLeft")
    assert heading.inner_text() == of_part
    section.locator("[name=place]").select_option("first position")
    assert "first position: " in output(opened, 3)
    section.locator("[name=part]").select_option("attention of layer 1")
    assert heading.inner_text().endswith(": attention of layer 1")
    assert "ln_1" in section.locator("[data-part=gates]").inner_text()
    box = in_sight(section.locator(".map .nsewdrag").first)
    low, high = opened.evaluate("document.querySelector('#explorer-3 .map').layout.xaxis.range")
    opened.mouse.click(box["x"] + box["width"] * (2.2 - low) / (high - low), box["y"] + 5)
    opened.wait_for_function("!document.querySelector('#explorer-3 [data-part=heading]').innerText.endsWith('layer 1')")
    assert heading.inner_text().endswith("the feed-forward part of layer 2")


@needs_chromium
@pytest.mark.parametrize("width", [400, 1400])
def test_nothing_overflows(browser, path, width):
    with test_page.opened(browser, path, width) as window:
        window.wait_for_function(DRAWN)
        seen = window.evaluate(test_page.LOOK)
    assert (seen["width"], seen["beyond"]) == (width, 0)


@needs_chromium
def test_without_scripts_the_figure_is_there(browser, path):
    with browser.new_context(java_script_enabled=False) as context:
        window = context.new_page()
        window.goto(path.as_uri())
        assert window.locator("#section-2-figure-damage_errors figure svg").first.is_visible()
        assert not window.locator("#explorer-2").is_visible()


@needs_chromium
def test_the_chosen_cell_is_marked_beside_the_map(untouched):
    over = """() => {
        const places = name => [...document.querySelectorAll(name)].map(one => one.getBoundingClientRect());
        const [map] = places('#explorer-1 .nsewdrag');
        return places('#explorer-1 .shapelayer path').map(at => at.bottom > map.top + 0.5 && at.left < map.right - 0.5);
    }"""
    assert untouched.evaluate(over) == [False, False]


@needs_chromium
def test_text_of_explorers_is_large_enough(untouched):
    sizes = "texts => texts.filter(one => one.textContent).map(one => parseFloat(getComputedStyle(one).fontSize))"
    assert min(untouched.locator(".explorer svg text").evaluate_all(sizes)) >= 11


@needs_chromium
def test_print_shows_the_figure_and_the_screen_its_explorer(opened):
    assert opened.locator("#explorer-2").is_visible()
    assert not opened.locator("#section-2-figure-damage_errors figure").is_visible()
    opened.emulate_media(media="print")
    assert not opened.locator("#explorer-2").is_visible()
    assert opened.locator("#section-2-figure-damage_errors figure svg").first.is_visible()


def test_a_page_embeds_plotly_once_where_it_has_explorers(path):
    assert len(page("None", [Section("None", [])], "")) < 20_000
    assert len(plotly()) < 700_000 < path.stat().st_size < 2_000_000


# One page of a model


def test_the_set_look():
    specs = experiments_of("look")
    shown = ["trace", "origins", "ablation", "damage", "sweep", "token_losses", "continuation"]
    assert [spec.shows for spec in specs] == shown
    specs = experiments_of("look", models=["pocket/gpt2-0.1m"])
    assert {getattr(spec, "model", None) or spec.models[0] for spec in specs} == {"pocket/gpt2-0.1m"}
    with pytest.raises(UserError, match="takes one model, got 2"):
        experiments_of("look", models=["pocket/gpt2-0.1m", MODEL])
