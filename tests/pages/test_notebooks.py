"""The notebooks, executed from top to bottom, and what they claim."""

import math
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import outliers
from tests.conftest import needs_smollm2

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))

# Notebook: what its words say, and an expression over its own variables that has to be true where they stand.
# A line holds a sentence, and the next ones its check:
# fmt: off
CLAIMS = {
    "1_find": {
        "One feature of 576": "list(trace.outlier_features()['feature']) == [247] and model.config.hidden_size == 576",
        "nearly half of the layers": "0.4 < trace.outlier_features()['layers'][0] < 0.5",
        "at nearly every position, and its values are all of one sign":
            "trace.outlier_features()['positions'][0] > 0.95 and trace.outlier_features()['one_sided'][0]",
        "Feature 17 comes near: it is large at nearly every position, but in too few layers":
            "(f := trace.features().set_index('feature'))['positions'][17] > 0.95 and f['layers'][17] < 0.25",
        "Feature 507 has larger values than either, at next to no position":
            "(f := trace.features().set_index('feature'))['max'][507] > f['max'][[17, 247]].max() "
            "and f['positions'][507] < 0.01",
        "The largest value by far stands in front of the second feed-forward projection (`ffn_out`), on the first":
            "(t := trace.largest_values().set_index('role'))['max']['ffn_out'] > 20 * t['max'].drop('ffn_out').max() "
            "and t['position']['ffn_out'] == 0",
        "its massive activations. They are on the first token too, in feature 507":
            "(t := trace.massive_activations().nlargest(3, 'max'))['max'].min() > trace.largest_values()['max'].max() "
            "and set(t['position']) == {0} and set(t['feature']) == {507}",
        "an attention sink for more than half of all heads, and no other position is one for a tenth of them":
            "(s := trace.attention_sinks()['share'])[0] > 0.5 and s[1:].max() < 0.1",
        "computes the same function": "abs(perplexities[0] / perplexities[1] - 1) < 1e-5",
        "in which no outlier feature grew": "before == [] and sorted(after) == [3, 70]",
    },
    "2_look_inside": {
        "one outlier feature, number 247": "list(trace.outlier_features()['feature']) == [247]",
        "a bright line through half of the layers, from layer 9 to layer 24":
            "(l := (trace.largest('attn_in')[:, 247] >= 6).nonzero()[:, 0].tolist()) and len(l) == trace.layers // 2 "
            "and (l[0], l[-1]) == (9, 24)",
        "In front of the feed-forward layers it stays below 3": "trace.largest('ffn_in')[:, 247].max() < 3",
        "small on the first token and large on all others":
            "(m := sum(trace.statistics[f'{role}.magnitude'][:, 247] for role in ('attn_in', 'ffn_in')))[0] "
            "< 0.5 * m[1:].min()",
        "All tokens but the first carry it, delimiters a little more than the others":
            "(t := trace.tokens(247, by='type').set_index('type')['mean'])['first'] < 2 < 6 < t.drop('first').min() "
            "and t.idxmax() == 'delimiter' and t.max() < 1.2 * t['word start']",
        'The strongest tokens say little by themselves: "the", "and", the comma': (
            "set(trace.tokens(247)['token_text'].head(6)) >= {\"'␣the'\", \"'␣and'\", \"','\"}"
        ),
        "The weakest ones stand inside words":
            "not [t for t in places[places['extreme'] == 'weakest'].head(4)['token_text'] if '␣' in t]",
        "it reaches 24,000 on the first token, a hundred times as much as on the others":
            "(t := trace.tokens(507, by='type', role='residual').set_index('type')['mean'])['first'].round(-3) == 24000"
            " and 90 < t['first'] / t.drop('first').max() < 110",
        "layer 11, which has the largest value of all":
            "(t := trace.largest_values().set_index('role'))['layer']['ffn_out'] == 11 "
            "and t['max'].idxmax() == 'ffn_out' and abs(states.abs().max() - t['max'].max()) < 1e-2",
        "one unit of 1,536 is most of what there is": "states.shape[1] == 1536 and share[first].min() > 0.8",
        "On the others the largest unit is less than a tenth": "share[~first].mean() < 0.1",
    },
    "3_ablate": {
        "one feature of 576": "list(features) == [247] and model.config.hidden_size == 576",
        "perplexity grows several times over": "found['damage']['outliers', 'zero'] > 3",
        "the attention is about half as sure":
            "0.4 < found['top1_softmax']['outliers', 'zero'] / measurements['top1_softmax'][0] < 0.6 "
            "and measurements['subject'][0] == 'none'",
        "cost next to nothing": "found['damage']['control', 'zero'] < 0.05",
        "with its mean in its place the model loses far less":
            "found['damage']['outliers', 'mean'] < 0.3 * found['damage']['outliers', 'zero']",
        "it still costs more than any of the random features, and so does shuffling":
            "(found['damage']['outliers'] - measurements[measurements['subject'] == 'control'].groupby('method')"
            "['damage'].max()).gt(0).all()",
        "Ten draws of random features": "len(controls) == 10",
        "absmax multiplies the perplexity of the whole model, and that of the model without the feature too":
            "perplexities['absmax'] > 1.5 * perplexities['as it is'] "
            "and perplexities['absmax, without the feature'] > 1.5 * perplexities['without the feature']",
    },
    "4_quantize": {
        "With one scale for a whole tensor the model is broken": "min(costs['absmax'], costs['zeropoint']) > 0.4",
        "A scale for each token helps most of the way": "costs['absmax-vector'] < 0.2 * costs['absmax']",
        "LLM.int8() loses least": "costs['llm.int8'] == min(costs.values())",
        "Quantized alone it costs as much as everything; with it exact, little is left":
            "(t := damage.roles.set_index('role'))['damage_only']['ffn_out'] > 0.7 * costs['absmax'] "
            "and t['damage_without']['ffn_out'] < 0.15 * costs['absmax'] "
            "and t['damage_only'].drop('ffn_out').max() < 0.15 * costs['absmax']",
        "In layer 11 the mean error of a token is as large as its output: 0 dB":
            "abs((t := damage.errors.nlargest(1, 'by_token').iloc[0])['by_token_db']) < 0.1 and t['layer'] == 11",
        "The largest input stands on the first token": "damage.errors.nlargest(1, 'by_token')['position'].item() == 0",
        "The outlier feature of the attention inputs (feature 247) is not what breaks absmax":
            "damage.roles.set_index('role')['damage_only']['attn_in'] < 0.02",
        "this one projection of 210": "len(damage.errors) == 210",
        "With the worst projection exact part of the damage is gone, with the worst four more than half of it":
            "0.05 < 1 - repaired[1] / costs['absmax'] < 0.5 < 1 - repaired[4] / costs['absmax'] < 0.8",
        "All of the worst twelve are second feed-forward projections":
            "all(path.endswith('down_proj') for path in ranked[:12])",
        "Each of them helps, and both together leave about as little as LLM.int8() does":
            "max(saved.values()) < 0.5 * costs['absmax'] "
            "and abs(saved['absmax+smoothing+hadamard'] - costs['llm.int8']) < 0.01",
        "generates with a KV cache": "'Paris' in answer",
    },
    "5_the_papers_figures": {
        "Pocket models hardly notice 8 bits":
            "(costs.drop(columns='smollm2-135m').pipe(lambda t: t / t.loc['fp32'] - 1)).abs().max().max() < 0.01",
        "absmax breaks it, and LLM.int8() keeps it":
            "(c := costs['smollm2-135m'])['absmax'] > 1.5 * c['fp32'] and c['llm.int8'] < 1.04 * c['fp32']",
        "scatters the results of a real model":
            "max(r['standard_deviation'] / r['value'] for r in rows if r['model'] == 'smollm2-135m') > 0.002",
        "Three of the seven causal pocket models without experts have outlier features, in most of their layers":
            "len(p := table.drop('smollm2-135m')) == 7 and (p['count'] > 0).sum() == 3 "
            "and p['layers'][p['count'] > 0].min() > 0.5",
        "SmolLM2 has one, which is at nearly every position":
            "table['count']['smollm2-135m'] == 1 and table['positions']['smollm2-135m'] > 0.95",
        "The one outlier feature of SmolLM2 is as large as those of small models in the paper; those of its large":
            "(p := __import__('outliers.published.numbers', fromlist=['x']).published_models()"
            "['median'].abs()).min() < abs(table['median']['smollm2-135m']) < p.median() < p.max() / 2",
    },
    "6_why_it_is_there": {
        "a single one of 134 million weights": "round(model.num_parameters() / 1e6) in (134, 135)",
        "It starts in layers 0 and 1 and grows over twenty layers; then three heads of layer 24 take back half of it":
            "(s := account.states().query('feature == 247').set_index('layer')['value'])[2] < -25 "
            "and s.idxmin() in (22, 23) and abs(s[25] / s[24]) < 0.5 "
            "and (h := writers.query('feature == 247 and writer == \"head\"').nlargest(3, 'value'))"
            "['layer'].eq(24).all() and h['value'].sum() > 0.4 * -s[24]",
        "it is made at once, at the first position, by two neurons of layer 11, and a neuron of layer 28":
            "(t := of_507.head(3))['layer'].tolist() == [11, 28, 11] and t['writer'].eq('neuron').all() "
            "and -t['first'].iloc[1] > 0.5 * t['first'].iloc[[0, 2]].sum()",
        "In front of the attention of layers 1 to 8 the gain of feature 247 is one of the two smallest of all 576":
            "(g := of_247['rank'])[1:8].min() >= 575 and len(g) == 30",
        "From layer 9 on it is larger than the median": "(of_247['value'] > of_247['median'])[9:].all()",
        "Without it keys cost most of these, and random features cost next to nothing anywhere":
            "(r := readers.set_index(['place', 'subject'])['cost']).drop('')[:, 'feature'].idxmax() == 'k' "
            "and r.drop('')[:, 'control'].abs().max() < 0.02",
        "without the feature in the keys that falls, and fewer heads have a sink there":
            "readers['margin'][5] < 0.8 * readers['margin'][0] and readers['sinks'][5] < 0.5 * readers['sinks'][0] "
            "and readers['place'][5] == 'k' and readers['subject'][5] == 'feature'",
        "Without one weight of layer 11, the one from neuron 1229 to feature 507, the perplexity is several":
            "best['candidate'].iloc[0].endswith('11.mlp.down_proj[507,1229]') and best['cost'].iloc[0] > 2",
        "Most of the ten weights nearest in magnitude cost nothing":
            "len(n := best.loc[best['treatment'] == 'nearest', 'cost']) == 10 and n.abs().median() < 0.01",
        "without the whole neuron, this weight included, it costs little":
            "best.set_index('treatment')['cost']['neuron'] < 0.1",
        "put at its mean it costs next to nothing": "best.set_index('treatment')['cost']['massive'] < 0.01",
        "Half of the weight costs a little, and twice the weight nothing":
            "0.05 < (c := best.set_index('factor')['cost'])[0.5] < 0.5 and c[2] < 0.01",
        "Without the massive entries the model is broken. Without the first position next to nothing is lost":
            "perplexities[1] > 1000 * perplexities[0] and abs(perplexities[2] / perplexities[0] - 1) < 0.01",
        "for the second takes its place":
            "states['without the first position'][1] > 0.9 * states['as it is'][0] > 100 * states['as it is'][1]",
    },
}
# fmt: on


def kinds(notebook) -> list[list[str]]:
    """What each code cell puts out: text, tables, pictures; not a bar of progress, which comes where it takes long."""
    shown = ([one for one in cell.outputs if one.get("name") != "stderr"] for cell in cells_of(notebook))
    return [sorted({kind for one in of_cell for kind in one.get("data", {"stream": None})}) for of_cell in shown]


def cells_of(notebook, kind: str = "code") -> list:
    """Its cells of a kind."""
    return [cell for cell in notebook.cells if cell.cell_type == kind]


def numbers(notebook) -> list[tuple[float, bool]]:
    """The numbers that its code cells print, each with whether it is a percentage."""
    shown = (output for cell in cells_of(notebook) for output in cell.outputs if output.get("name") != "stderr")
    texts = (output.get("text") or output.get("data", {}).get("text/plain", "") for output in shown)
    found = re.findall(r"([-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]\d+)?)(%?)", "\n".join(texts))
    return [(float(number.replace(",", "")), bool(percent)) for number, percent in found]


def differing(kept, ran) -> list[tuple[float, float]]:
    """Numbers of two notebooks that differ by more than processors do, which round in different orders: one draw of
    absmax without the feature is 714.7 on one of them and 756.4 on another."""
    pairs = zip(numbers(kept), numbers(ran), strict=True)
    return [
        (one, other)
        for (one, percent), (other, _) in pairs
        if not math.isclose(one, other, rel_tol=0.1, abs_tol=1 if percent else 0.02)
    ]


def words(text: str) -> str:
    """A text without its line breaks."""
    return re.sub(r"\s+", " ", text)


def test_each_notebook_has_claims():
    assert {path.stem for path in NOTEBOOKS} == set(CLAIMS)


@pytest.mark.nightly("notebooks/")
@needs_smollm2
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_puts_out_what_is_kept_and_claimed(path, tmp_path, monkeypatch):
    monkeypatch.setenv("TQDM_DISABLE", "1")
    kept = nbformat.read(path, as_version=4)
    ran = nbformat.read(path, as_version=4)
    said = words("\n".join(cell.source for cell in cells_of(kept, "markdown")))
    assert not [claim for claim in CLAIMS[path.stem] if words(claim) not in said]
    for cell in cells_of(ran):
        cell.outputs = []
    checks = [f"true = {{{', '.join(f'{claim!r}: ({true})' for claim, true in CLAIMS[path.stem].items())}}}"]
    checks.append("assert all(true.values()), [claim for claim, said in true.items() if not said]")
    client = NotebookClient(ran, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    ran.cells.append(nbformat.v4.new_code_cell("\n".join(checks)))
    client.execute()
    ran.cells.pop()
    assert kinds(ran) == kinds(kept)
    assert differing(kept, ran) == [], "run `make notebooks`"
    assert any("image/png" in kind for kind in kinds(kept))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_kept_outputs_are_clean(path):
    notebook = nbformat.read(path, as_version=4)
    code = cells_of(notebook)
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "executed in order, once"
    assert all(output.output_type != "error" for cell in code for output in cell.outputs)
    text = path.read_text()
    assert "Warning" not in text
    assert "site-packages" not in text


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_only_public_names_are_used(path):
    code = "\n".join(cell.source for cell in cells_of(nbformat.read(path, as_version=4)))
    assert not re.findall(r"(?:from|import) +outliers\.\S+", code)
    used = set(re.findall(r"\boutliers\.(\w+)", code)) - {"get"}  # which is a command
    assert used <= set(outliers.__all__)
    assert set(re.findall(r"\boutliers\.plot\.(\w+)", code)) <= set(outliers.plot.__all__)


@pytest.mark.parametrize(("there", "uploaded"), [(True, []), (False, []), (False, ["outliers-0.1.tar.gz"])])
def test_the_first_cell_installs_what_is_not_there(there, uploaded, monkeypatch, tmp_path):
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    cell = cells_of(notebook)[0].source
    commands = []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: there or None)
    monkeypatch.setattr("subprocess.run", lambda command, **_options: commands.append(command[1:]))
    monkeypatch.chdir(tmp_path)
    for name in uploaded:
        (tmp_path / name).touch()
    if not (there or uploaded):
        with pytest.raises(SystemExit, match=r"outliers-….tar.gz.*beside this notebook"):
            exec(cell, {})
        return
    exec(cell, {})
    *install, get = commands
    assert install == [["-m", "pip", "install", "--quiet", source] for source in uploaded if not there]
    assert get == ["-m", "outliers.get", "smollm2-135m"]
