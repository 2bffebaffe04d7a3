"""The notebooks, executed from top to bottom, and what they claim."""

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

from tests.conftest import needs_smollm2

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))

# Notebook: what its words say, and an expression over its own variables that has to be true where they stand.
CLAIMS = {
    "1_find_outliers": {
        "One feature of 576": "list(trace.outlier_features()['feature']) == [247] and model.config.hidden_size == 576",
        "nearly half of the layers": "0.4 < trace.outlier_features()['layers'][0] < 0.5",
        "at nearly every position": "trace.outlier_features()['positions'][0] > 0.95",
        "all of one sign": "trace.outlier_features()['one_sided'][0]",
        "small on the first token and large on all others": (
            "(m := sum(trace.statistics[f'{role}.magnitude'][:, 247] for role in ('attn_in', 'ffn_in')))[0] "
            "< 0.5 * m[1:].min()"
        ),
        "The largest value by far stands in front of the second feed-forward projection": (
            "(t := trace.largest_values().set_index('role'))['max']['ffn_out'] > 20 * t['max'].drop('ffn_out').max() "
            "and t['position']['ffn_out'] == 0"
        ),
        "position 0 is an attention sink for a large share": "trace.attention_sinks()['share'][0] > 0.3",
        "computes the same function": "abs(perplexities[0] / perplexities[1] - 1) < 1e-5 and before == []",
        "with outliers of a known place": "sorted(after) == [3, 70]",
    },
    "2_what_they_carry": {
        "one feature of 576": "list(features) == [247]",
        "perplexity grows several times over": "outlier['damage']['zero'] > 3",
        "the attention is about half as sure": (
            "0.4 < outlier['top1_softmax']['zero'] / found['top1_softmax'][0] < 0.6 and found['subject'][0] == 'none'"
        ),
        "cost next to nothing": "control['damage']['zero'] < 0.05",
        "with its mean in its place the model loses far less": (
            "outlier['damage']['mean'] < 0.3 * outlier['damage']['zero']"
        ),
        "it still costs more than any of the random features, and so does shuffling": (
            "(outlier['damage'] - measurements[measurements['subject'] == 'control'].groupby('method')['damage'].max())"
            ".gt(0).all()"
        ),
    },
    "3_quantization_sweep": {
        "With one scale for a whole tensor the model is broken": "min(costs['absmax'], costs['zeropoint']) > 0.4",
        "A scale for each token helps most of the way": "costs['absmax-vector'] < 0.2 * costs['absmax']",
        "LLM.int8() loses least": "costs['llm.int8'] == min(costs.values())",
        "(feature 247) is not what breaks `absmax`": (
            "(t := largest.set_index('role'))['feature']['attn_in'] == 247 "
            "and t['max']['ffn_out'] > 100 * t['max']['attn_in']"
        ),
        "Pocket models hardly notice 8 bits": (
            "(c := table1(rows).drop(columns='smollm2-135m').pipe(lambda t: t / t.loc['fp32'] - 1)).abs().max().max() "
            "< 0.01"
        ),
        "scatters the results of a real model": (
            "max(r['standard_deviation'] / r['value'] for r in rows if r['model'] == 'smollm2-135m') > 0.002"
        ),
        "generates with a KV cache": "'Paris' in answer",
    },
    "4_the_papers_figures": {
        "SmolLM2 has one outlier feature, which is at nearly every position": (
            "models.loc['smollm2-135m', 'count'] == 1 and models.loc['smollm2-135m', 'positions'] > 0.95"
        ),
        "both fractions grow e-fold while perplexity falls by about ten": (
            "all(9 < fit.scale < 12 for fit in fits.values())"
        ),
    },
}


def kinds(notebook) -> list[list[str]]:
    """What each code cell puts out: text, tables, pictures; not a bar of progress, which comes where it takes long."""
    return [
        sorted(
            {
                kind
                for output in cell.outputs
                if output.get("name") != "stderr"
                for kind in output.get("data", {"stream": None})
            }
        )
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def words(text: str) -> str:
    """A text without its line breaks."""
    return re.sub(r"\s+", " ", text)


def test_each_notebook_has_claims():
    assert {path.stem for path in NOTEBOOKS} == set(CLAIMS)


@needs_smollm2
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_runs_and_puts_out_what_is_kept_and_claimed(path, tmp_path):
    kept = nbformat.read(path, as_version=4)
    ran = nbformat.read(path, as_version=4)
    said = words("\n".join(cell.source for cell in kept.cells if cell.cell_type == "markdown"))
    assert not [claim for claim in CLAIMS[path.stem] if words(claim) not in said]
    for cell in ran.cells:
        if cell.cell_type == "code":
            cell.outputs = []
    checks = [f"true = {{{', '.join(f'{claim!r}: ({true})' for claim, true in CLAIMS[path.stem].items())}}}"]
    checks.append("assert all(true.values()), [claim for claim, said in true.items() if not said]")
    client = NotebookClient(ran, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}})
    ran.cells.append(nbformat.v4.new_code_cell("\n".join(checks)))
    client.execute()
    ran.cells.pop()
    assert kinds(ran) == kinds(kept)
    assert any("image/png" in kind for kind in kinds(kept))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_kept_outputs_are_clean(path):
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "executed in order, once"
    assert all(output.output_type != "error" for cell in code for output in cell.outputs)
    text = path.read_text()
    assert "Warning" not in text
    assert "site-packages" not in text
