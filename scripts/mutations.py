"""Small mistakes, one after the other in a copy of the clone, and which of them the tests catch.

`python scripts/mutations.py` runs for each the tests that concern its module, `python scripts/mutations.py -m "not
slow"` the fast ones among them: arguments are pytest's. A number in the variable ONLY, such as 7 or 1-20, names some.
"""

import os
import shutil
import sys
import tempfile
from argparse import ArgumentParser
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

# The beginning of a module's path: the tests that concern it, the likeliest first.
TESTS = {
    "outliers/criterion": "door planning",
    "outliers/files": "door",
    "outliers/metrics/accuracy": "vision",
    "outliers/runs/traces": "results",
    "outliers/metrics/weights": "against",
    "outliers/models/stream": "streaming",
    "outliers/paper": "training_runs",
    "outliers/plugins": "loaders",
    "outliers/commands/ablate": "seq2seq",
    "outliers/runs/stages/plan": "planning",
    "outliers/quantization/plans": "exports",
    "outliers/runs/reprint": "commands",
    "outliers/runs/callback": "callback",
    "outliers/runs/cluster": "cluster",
    "outliers/runs/forecast": "forecast",
    "outliers/runs/rows": "results every_command door",
    "outliers/subjects/row": "results every_command door",
    "outliers/show/value": "units masked",
    "outliers/show": "failures masked findings",
    "outliers/config": "masked attention",
    "outliers/subjects": "vision latency",
    "outliers/terminal/amounts": "forecast",
    "outliers/metrics/training": "training_runs",
    "outliers/models/load": "models",
    "outliers/terminal": "progress",
    "outliers/text/blocks": "losses refusals",
    "outliers/text/documents": "door",
    "outliers/trainer": "recipes",
    "outliers/variants/edges": "edges",
    "outliers/variants/plant": "models",
    "outliers/views/plan": "planning",
    "outliers/views/remedies": "report",
    "outliers/views/trace": "vision",
    "outliers/views/table7": "training_runs",
    "outliers/views/latency": "report",
    "outliers/views/origins": "origins",
    "outliers/tracing/tokens": "pieces tracing streaming",
    "outliers/tracing/states": "hidden_states streaming",
    "outliers/tracing/sketch": "tracing",
    "outliers/tracing/compare": "variants tracing",
    "outliers/tracing": "tracing evaluation streaming results seq2seq",
    "outliers/models/attention": "attention range caches keys",
    "outliers/models/stored/tensors": "weight_files quantization",
    "outliers/models/stored": "stored",
    "outliers/models/skeleton": "models",
    "outliers/models/gguf": "gguf",
    "outliers/quantization/store": "quantization weight_files conformance",
    "outliers/quantization/products": "training rooms products",
    "outliers/quantization/attention": "attention quantization conformance",
    "outliers/quantization/remedies/gptq": "rounding",
    "outliers/quantization/remedies/awq": "rounding",
    "outliers/quantization/remedies/learning": "rotation",
    "outliers/quantization/magnitudes": "rotation rounding remedies",
    "outliers/quantization/cache": "caches",
    "outliers/quantization": "remedies quantization schemes formats conformance blocks damage",
    "kernels/outlier_kernels/triton": "triton",
    "kernels/outlier_kernels/reference_formats": "formats",
    "kernels/outlier_kernels/reference_systems": "schemes experts",
    "kernels/outlier_kernels/reference_integers": "kernels formats triton",
    "kernels/outlier_kernels/reference_products": "products rooms triton",
    "kernels/outlier_kernels/reference_states": "states triton tracing",
    "kernels/outlier_kernels/cpu/products": "products rooms training",
    "kernels/outlier_kernels": "kernels passes formats compiled states rooms gpu triton",
    "outliers/metrics/perplexity": "evaluation damage quantization",
    "outliers/metrics/token_losses": "losses",
    "outliers/text/pieces": "pieces losses",
    "outliers/metrics/errors": "damage",
    "outliers/metrics/places": "damage",
    "outliers/metrics/memory": "memory",
    "outliers/metrics/candidates": "super_weights",
    "outliers/metrics/keys": "keys",
    "outliers/metrics/origins": "every_command origins",
    "outliers/metrics/sinks": "readers",
    "outliers/runs/stages": "super_weights readers",
    "outliers/views": "super_weights readers",
    "outliers/variants/cached": "caches",
    "outliers/variants": "super_weights prefix variants",
    "outliers/metrics/ablations": "ablation evaluation attention",
    "outliers/metrics": "cells damage ablation evaluation every_command",
    "outliers/runs": "every_command cells rows results latency paper survival experiment",
}

MUTATIONS = {
    "outliers/models/stored/tensors.py": [
        ("return file.read(start, end).view", "return WeightFile(file.path).read(start, end).view"),
        ("position != file.size", "False"),
    ],
    "outliers/models/skeleton.py": [("compute_buffers(model)\n", "pass\n")],
    "outliers/tracing/sketch.py": [
        ("(1 + RELATIVE_ERROR) / (1", "(1 + 2 * RELATIVE_ERROR) / (1"),
        ("fraction * (totals - 1)", "fraction * totals"),
        ("* 2 / (_GAMMA + 1)", "* 2 / _GAMMA"),
    ],
    "outliers/tracing/compare.py": [("b[name] - a[name]", "a[name] - b[name]"), ("-ratio, -change", "ratio, -change")],
    "outliers/tracing/trace.py": [
        (".clamp_(max=1)", ""),
        ("SINK * queries", "SINK * len(visible)"),
        ("magnitudes[role] >= self.alpha", "magnitudes[role] > self.alpha"),
        ("kept[self.number, : len(ids)].zero_()", "pass"),
    ],
    "outliers/tracing/result.py": [
        ('positions_hit"].double() / self.positions', 'positions_hit"].double() / (self.sequences * self.block)'),
        ("(high >= self.alpha) ^ (low", "(high >= self.alpha) | (low"),
        ("if bool(self.names) != bool(other.names):", "if False:"),
        ('return self.stack == "cross"', "return False"),
    ],
    "outliers/tracing/tokens.py": [("ids[0] = self.vocabulary", "ids[-1] = self.vocabulary")],
    "outliers/tracing/states.py": [("== len(blocks):\n            raise", "== 1 + len(blocks):\n            raise")],
    "outliers/tracing/store.py": [
        ('if not statistics["text.sequences"].all() or', "if"),
        ("(keys.diff() <= 0).any() or ", ""),
        ("if not counted.equal(of_role):", "if False:"),
    ],
    "outliers/quantization/schemes.py": [
        ("(scheme.quantizes, operands", "(0, operands"),
        ("math.lcm(*groups)", "max(groups)"),
        ("(remedy.roles or (role,))", "remedy.roles"),
        ("[*REMEDIES, remedy.name]", "[remedy.name]"),
        ('"rows"} if self.searches', '"rows"} if False'),
    ],
    "outliers/quantization/remedies/__init__.py": [
        ("and takes.fits(number)", ""),
        ("for role in known if role in self.roles", "for role in self.roles"),
    ],
    "outliers/quantization/magnitudes.py": [
        (" and scheme.learning not in self.learned", " and not self.learned"),
        ("min(len(x), math.ceil(SAMPLE / blocks))", "len(x)"),
    ],
    "outliers/quantization/linear.py": [
        (".is_set_to(weight) and self.version == version_of(weight)", ".is_set_to(weight)"),
        (" and self.magnitudes is other.magnitudes", ""),
        ('step.call("weight", exact, fitted[-1])', "exact"),
    ],
    "outliers/quantization/remedies/clip.py": [("math.ceil(round(quantile", "math.floor(round(quantile")],
    "outliers/quantization/remedies/smoothing.py": [("weights.pow(1 - strength)", "weights.pow(strength)")],
    "outliers/quantization/remedies/tokens.py": [("(high >= number) | (low <= -number)", "high >= number")],
    "outliers/quantization/convert.py": [
        ("return new.train(module.training)", "return new"),
        ("None if part.path in exact_paths else LAYERS[keep]", "LAYERS[keep]"),
    ],
    "outliers/quantization/store.py": [("if not same:", "if False:")],
    "outliers/quantization/layer.py": [("hidden_states, *self.parameters()", "(hidden_states,)")],
    "outliers/models/attention.py": [
        ("changes=(*changes, partial(visit, attention.layer))", "changes=(partial(visit, attention.layer), *changes)"),
        ("stack.callback(change_attention, attention.module, changes=changes)", "pass"),
        ("function = attending.function or ", "function = "),
        ("if attending.function or attending.changes:", "if attending.function and attending.changes:"),
        ("-0.5 if self.scaling is None else self.scaling", "-0.5 if True else self.scaling"),
    ],
    "outliers/quantization/attention.py": [("products.scores) * (query", "products.values) * (query")],
    "outliers/quantization/products.py": [
        ("is_outlier = magnitudes.float() >= threshold", "is_outlier = magnitudes.float() > threshold")
    ],
    "kernels/outlier_kernels/reference_integers.py": [
        ("return scale.masked_fill_(largest == 0, 1)", "return scale"),
        ("-(dynamic_range * low).round_() - code_max", "-(dynamic_range * low + code_max).round_()"),
    ],
    "kernels/outlier_kernels/dispatch.py": [
        ("if found[1].serves(*operands):", "if True:"),
        ("if prepared else os", "if False else os"),
    ],
    "kernels/outlier_kernels/reference.py": [
        ("(most >= threshold)", "(most > threshold)"),
        ("torch.int32 if largest_sum(k, a, b) < 2**31 else torch.float64", "torch.int32"),
        ("absmax = matrix.masked_fill(hits, 0)", "absmax = matrix.masked_fill(outliers, 0)"),
    ],
    "kernels/outlier_kernels/reference_formats.py": [
        (".clamp_(min=LEAST_E4M3)", ""),
        (".clamp_(-half,", ".clamp_(1 - half,"),
        ("(of_group * of_matrix).masked_fill(largest == 0, 1)", "(of_group / of_matrix).masked_fill(largest == 0, 1)"),
    ],
    "kernels/outlier_kernels/reference_products.py": [("torch.where(places < 0, size, places)", "places.clamp(0)")],
    "kernels/outlier_kernels/reference_states.py": [("x[1:].abs().amax()", "x.abs().amax()")],
    "kernels/outlier_kernels/cpu/codes.py": [(".index_fill_(0, outliers, 0).amax()", ".amax()")],
    "kernels/outlier_kernels/cpu/plain.py": [("OUTERMOST = 126", "OUTERMOST = 128")],
    "kernels/outlier_kernels/cpu/packed.py": [("return 128 * int(", "return int(")],
    "kernels/outlier_kernels/cpu/products.py": [("0 if flags is None or flags.ndim == 1 else k", "0")],
    "kernels/outlier_kernels/cpu/passes.py": [
        (" + ((bits >> np.uint32(16)) & np.uint32(1))", ""),
        ("min(low[i], low[j]), max(high[i], high[j])", "min(low[i], low[j]), min(high[i], high[j])"),
        ("if best[0] >= INFINITE:", "if False:"),
    ],
    "kernels/outlier_kernels/triton/quantization.py": [("factor * low) - 127", "factor * low + 127)")],
    "kernels/outlier_kernels/triton/product.py": [
        ("inliers -= number", "inliers -= 0"),
        ("places += matrix * places_stride", "pass"),
    ],
    "kernels/outlier_kernels/triton/states.py": [("(token > 0)[:, None]", "(token >= 0)[:, None]")],
    "outliers/metrics/perplexity.py": [("(total, len(self.targets)", "(total, 1 + len(self.targets)")],
    "outliers/metrics/token_losses.py": [
        ("self.exact.add(start, exact, None)", "self.exact.add(start, logits, None)"),
        ("carried >= share * total", "carried > (1 - share) * total"),
    ],
    "outliers/text/pieces.py": [
        ("OVERLAPS = 8", "OVERLAPS = 4"),
        ("tokens[0] - 1, tokens[-1]", "tokens[0], tokens[-1]"),
        ("np.append(ends[:-1], len(text))", "ends"),
        ("first < middle < last", "first <= middle <= last"),
        ("for starts in (words, self.starts)", "for starts in (self.starts,)"),
        ("isinstance(before.tokenizer.backend_tokenizer.model, BPE)", "True"),
        ("and before.text[marks[1] : marks[2]].strip()", ""),
    ],
    "outliers/metrics/agreement.py": [("weighted * scale +", "weighted +")],
    "outliers/metrics/errors.py": [("nonzero = energies > 0", "nonzero = energies >= 0")],
    "outliers/metrics/places.py": [("if len(places) > 1 and field not in ALONE:", "if field not in ALONE:")],
    "outliers/quantization/remedies/gptq.py": [
        ("left[:, end:] -= errors", "left[:, end:] += errors"),
        ("argsort(descending=True, stable=True)", "argsort(stable=True)"),
    ],
    "outliers/quantization/remedies/learning.py": [
        ("identity + half, (identity - half) @ matrix", "identity - half, (identity + half) @ matrix"),
        ("matrix + (reference.quantize(exact, quantizer).dequantize() - exact)", "matrix"),
    ],
    "outliers/quantization/cache_formats.py": [
        ("self.bits + 2 * HALF_BITS", "self.bits + HALF_BITS"),
        ("self.first", "self.first + 1"),
    ],
    "outliers/quantization/caches.py": [("flatten(-2).sqrt()", "flatten(-2)")],
    "outliers/variants/cached.py": [
        ("range(layer + 1, count)", "range(layer, count)"),
        ("format and replace(format", "format or replace(format"),
    ],
    "kernels/outlier_kernels/reference_systems.py": [("round_().clamp_(max=STEPS)", "round_()")],
    "outliers/metrics/memory.py": [
        ("tensor.numel() + 4 * scales", "tensor.numel()"),
        ("share * (number >= without_cache)", "share"),
    ],
    "outliers/metrics/top1.py": [
        ("weights = visits.queries / visits.queries.mean()", "weights = torch.ones_like(visits.queries)"),
        ("probabilities.amax(-1)", "probabilities.amin(-1)"),
    ],
    "outliers/metrics/ablations.py": [("np.arange(width), [*features, *outliers])", "np.arange(width), features)")],
    "outliers/runs/rows.py": [
        ("line = line.removeprefix(codecs.BOM_UTF8)", "line = line"),
        ('return not line.endswith(b"\\n")', "return True"),
    ],
    "outliers/subjects/row.py": [
        ("abs(value) < LARGEST_INTEGER", "abs(value) <= LARGEST_INTEGER"),
        ('value["value"] <= 0', 'value["value"] < 0'),
        ("names == list(part)", "True"),
    ],
    "outliers/runs/run.py": [
        ('row.run.get("experiment") == command', 'row.run.get("experiment") != command'),
        ("if cell.labels.items() <= row.provenance.items()", "if True"),
    ],
    "outliers/metrics/candidates.py": [
        ("self.total[feature] / self.sequences", "self.total[feature]"),
        ("min(abs(spikes", "max(abs(spikes"),
        ("distances[place] = torch.inf", "pass"),
        ("torch.minimum(magnitudes.mean(1", "torch.maximum(magnitudes.mean(1"),
        ("sorted(self.found[number] + entries)", "sorted(entries)"),
    ],
    "outliers/metrics/origins.py": [("{model, self.model} if positions", "{model} if positions")],
    "outliers/metrics/keys.py": [
        ("larger = other.largest.abs() > self.largest.abs()", "larger = other.largest > self.largest"),
        ("terms = self.weights[channel] * self.inputs[channel[0]] / positions", "terms = self.weights[channel]"),
        ("by_head[0, :, -len(before) :]", "by_head[0, :, : len(before)]"),
        ("or key[:2] not in self.changed", "or key[:2] in self.changed"),
    ],
    "outliers/metrics/sinks.py": [("else seen[..., 1:, :]", "else seen")],
    "outliers/runs/stages/super_weights.py": [
        ("key=lambda pair: -pair[0]", "key=lambda pair: pair[0]"),
        ('row["metric"] == "perplexity" and "standard_deviation" in row}', 'row["metric"] == "perplexity"}'),
    ],
    "outliers/views/super_weights.py": [('candidate["most_increase"])', "Value(0.0, 0.0))")],
    "outliers/variants/massive.py": [("entries.abs() > self.above", "entries > self.above")],
    "outliers/variants/unattended.py": [("queries != keys", "queries > keys")],
    "outliers/runs/planner.py": [(" and not cell.metric.timed", "")],
    "outliers/criterion.py": [
        (
            "isinstance(value, bool) or not 0 <= number < math.inf",
            "isinstance(value, bool) and not 0 <= number < math.inf",
        )
    ],
    "outliers/files.py": [("status.st_nlink > 1", "status.st_nlink > 2")],
    "outliers/runs/traces.py": [("keys() - unknown} == labels", "keys() - unknown} != labels")],
    "outliers/metrics/accuracy.py": [("logits.max(1, keepdim=True)", "logits.min(1, keepdim=True)")],
    "outliers/models/stored/compressed.py": [
        ('sizes.fields.get("type") == "float"', 'sizes.fields.get("type") != "float"')
    ],
    "outliers/models/stored/words.py": [
        ("else -(-features // size)", "else features // size"),
        ('if fields.get("sym") is True:', "if False:"),
    ],
    "outliers/models/stream.py": [("math.inf if self.memory is None else self.memory}", "math.inf}")],
    "outliers/views/table7.py": [("signed_increase(ppl / plain[size])", "signed_increase(plain[size] / ppl)")],
    "outliers/plugins/loader.py": [("if not exact:", "if exact:")],
    "outliers/runs/stages/plan.py": [
        ("while missing <= 0 and count - fails > 1", "while missing < 0 and count - fails > 1")
    ],
    "outliers/commands/ablate.py": [("metrics, count is counts[0])", "metrics, True)")],
    "outliers/quantization/fields.py": [("scheme.exact_outliers and not small", "scheme.exact_outliers")],
    "outliers/runs/cluster.py": [
        ("math.ceil(share * most)", "math.floor(share * most)"),
        ('node["CPU"] * memory / node["memory"]', 'node["CPU"] * memory / (2 * node["memory"])'),
    ],
    "outliers/runs/reprint.py": [
        (" and None not in map(local_place", " or None not in map(local_place"),
        (' and "__pycache__" not in path.parts', ""),
    ],
    "outliers/runs/forecast.py": [
        ("SLACK = 2", "SLACK = 1"),
        ("if room.gpus and sum(states) <=", "if room.gpus or sum(states) <="),
        ("passing = max(passing, needs.logit_matrices * tokens * shape.vocabulary)", "passing = passing"),
    ],
    "outliers/runs/callback.py": [
        ("keep_torch_compile=False", "keep_torch_compile=True"),
        ("(last or state.global_step % self.every == 0)", "(state.global_step % self.every == 0)"),
    ],
    "outliers/show/section.py": [("[] if of_left <= {BASELINE} < variants else left", "left")],
    "outliers/show/value.py": [
        ("_combined(ratio - 1,", "_combined(ratio,"),
        ('row.get("mask_seeds", 1) > 1', 'row.get("mask_seeds", 1) > 2'),
    ],
    "outliers/config/experiment.py": [
        ("if scheme == PEER or not written else", "if not written else"),
        (
            'self.block - 2 if self.objective == "each" else self.mask_seeds',
            'self.block if self.objective == "each" else self.mask_seeds',
        ),
    ],
    "outliers/subjects/served.py": [("if small:", "if False:")],
    "outliers/subjects/causal.py": [("if labels is not None and (labels == IGNORED).all():", "if False:")],
    "outliers/text/blocks.py": [("self.begins[:, len(self.first) + 1 :]", "self.begins[:, len(self.first) :]")],
    "outliers/text/documents.py": [("blank = blank or number", "blank = number")],
    "outliers/trainer/architectures.py": [('if norm == "rmsnorm":', "if False:")],
    "outliers/variants/plant.py": [
        ("factor * (offset + parameter[of_all]) - offset", "factor * (offset + parameter[of_all])")
    ],
    "outliers/variants/peer.py": [("if len(terms) > 2 or", "if")],
    "outliers/variants/written.py": [("parts[0] if len(parts) == 1 else Together(parts)", "Together(parts)")],
    "outliers/views/readers.py": [('table["subject"] != "control"', 'table["subject"] != "none"')],
    "outliers/views/trace.py": [("high = means[:, features].max().item()", "high = means[:, features].min().item()")],
    "outliers/views/remedies.py": [("any(point.kind == kind for point in measured)", "True")],
    "outliers/show/claims.py": [("place % 2 == 0 or not _WORDS.lacks(part, fields)", "True")],
    "outliers/variants/edges.py": [("place.head * len(part.outputs) // heads", "place.head % len(part.outputs)")],
    "outliers/metrics/weights.py": [("weight.abs().argmax()", "weight.argmax()")],
    "outliers/quantization/plans/compressed_tensors.py": [
        ("key=lambda group: len(group[1])", "key=lambda group: -len(group[1])")
    ],
    "outliers/quantization/plans/assigned.py": [(" if path not in inside)", ")")],
    "outliers/show/tables.py": [("if counts[place(row)] == 1", "if counts[place(row)] >= 1")],
    "outliers/terminal/amounts.py": [("if seconds >= 1.5 * factor", "if seconds >= factor")],
    "outliers/show/words.py": [("if share >= MANY:", "if share > 2 * MANY:")],
    "outliers/models/gguf/fields.py": [('"residual_scale", "embedding_scale")', '"residual_scale")')],
    "outliers/views/latency.py": [
        ('before["decode_q1"] > after["decode_q3"]', 'before["decode_q1"] >= after["decode_q3"]'),
        ('before["decode_q3"] < after["decode_q1"]', 'before["decode_q3"] <= after["decode_q1"]'),
    ],
    "outliers/metrics/training.py": [('(is_last and metric not in ("step", "epoch"))', "is_last")],
    "outliers/views/plan.py": [
        ('row.get("stage") == CONFIRM and "chosen" not in row)', 'row.get("stage") != CONFIRM and "chosen" not in row)')
    ],
    "outliers/terminal/forecaster.py": [("near = group or alike or", "near = group or")],
    "outliers/models/load.py": [
        ("        if not source.file:\n            model.gen", "        if source.file:\n            model.gen")
    ],
    "outliers/views/origins.py": [
        ("FAINTEST_GAIN, BRIGHTEST_GAIN = 1 / 16, 4", "FAINTEST_GAIN, BRIGHTEST_GAIN = 1 / 16, 8")
    ],
}

OUTPUT = "mutation.txt"  # of the tests of one mistake, in the clone


def test_files(module: str) -> list[str]:
    """Return the paths of the tests that concern a module."""
    names = next(names for beginning, names in TESTS.items() if module.startswith(beginning))
    return [str(path.relative_to(ROOT)) for name in names.split() for path in ROOT.glob(f"tests/*/test_{name}.py")]


def caught_by(clone: Path, module: str, old: str, new: str, arguments: list[str]) -> str | None:
    """Return the first test that fails after a line of a module of the clone was changed; None if none does."""
    path = clone / module
    sound, times = path.read_text(), path.stat()
    if sound.count(old) != 1:
        raise SystemExit(f"{module} has {sound.count(old)} of '{old}'; expected one: mend the table")
    path.write_text(sound.replace(old, new))
    tests = ["-x", "-q", "-rfE", "--tb=no", "-p", "no:cacheprovider", *arguments, *test_files(module)]
    process = get_context("fork").Process(target=run_tests, args=(clone, tests))
    try:
        process.start()
        process.join()
    finally:
        path.write_text(sound)
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))  # so that what is compiled of it serves again
    if process.exitcode not in (0, 1, 5):  # nothing failed, something failed, nothing was asked
        raise SystemExit(f"pytest ended with {process.exitcode} while {module} had '{new}'; expected tests that run")
    failures = [line for line in (clone / OUTPUT).read_text().splitlines() if line.startswith(("FAILED", "ERROR"))]
    return failures[0].split()[1] if process.exitcode == 1 else None


def run_tests(clone: Path, arguments: list[str]) -> None:
    """Run tests of a clone, with their output in a file.

    This process is a fork of one that has imported what takes long.
    """
    os.chdir(clone)
    sys.path[:0] = places = [str(clone), str(clone / "kernels")]
    os.environ["PYTHONPATH"] = os.pathsep.join(places)
    output = os.open(OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    sys.exit(int(pytest.main(arguments)))


def main() -> None:
    _, arguments = ArgumentParser(description=__doc__).parse_known_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    for name in ("torch", "transformers.modeling_utils", "datasets", "scipy.stats", "matplotlib.pyplot", "hypothesis"):
        import_module(name)
    table = [(module, *pair) for module, pairs in MUTATIONS.items() for pair in pairs]
    first, _, last = os.environ.get("ONLY", f"1-{len(table)}").partition("-")
    with tempfile.TemporaryDirectory() as folder:
        clone = shutil.copytree(ROOT, Path(folder) / "clone", ignore=shutil.ignore_patterns(".git", ".venv", "build"))
        if (ROOT.parent / "shared").exists():
            (Path(folder) / "shared").symlink_to(ROOT.parent / "shared")
        numbers = range(int(first), int(last or first) + 1)
        caught = 0
        for number in numbers:
            test = caught_by(clone, *table[number - 1], arguments)
            caught += bool(test)
            module, _, new = table[number - 1]
            print(f"{number:2} {f'caught by {test}' if test else 'SURVIVED'}, {module}: {new}", flush=True)
    print(f"{caught} of {len(numbers)} caught")


if __name__ == "__main__":
    main()
