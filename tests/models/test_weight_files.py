"""Which files are a model, and what is compared before any is read.

`test_generated_folders` writes folders with a seeded generator, each with some accidents; the others are particular.
Files that are refused for what is in them are in test_door.py, and those that are damaged in test_fuzz.py.
"""

import ctypes
import fnmatch
import json
import logging
import os
import random
import shutil
import struct
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from outliers import UserError, load_int8, load_model, load_quantized, perplexity, quantize, save_quantized
from outliers.commands.trace import Tracing
from outliers.models import checkpoint
from outliers.models.load import weights_hash
from outliers.models.names import POCKET
from outliers.models.source import Source
from outliers.models.stream import stream_model
from outliers.models.weight_files import INDEX, INT8, WEIGHTS
from tests.conftest import in_turn
from tests.gguf_files import save_gguf
from tests.models.test_stored import gptq, save_like
from tests.small_models import alter_config, alter_weights, make_model, trace_model

SEEDS = 30  # of generated folders
Tensors = dict[str, torch.Tensor]

# Small models that differ in what may go wrong: tied and untied heads, transposed weights, experts in parts.
KINDS = ("gpt2", "llama", "mixtral", "opt")


class Folder:
    """A checkpoint that is being made: what each file will hold, and what its index will list."""

    def __init__(self, path: Path, tensors: Tensors, chance: random.Random):
        self.path, self.chance = path, chance
        self.shards: dict[str, Tensors] = {}
        self.listed: dict | None = None
        keys = list(tensors)
        chance.shuffle(keys)
        if chance.random() < 0.4:
            self.shards[WEIGHTS] = {key: tensors[key] for key in keys}
        else:
            count = chance.randint(1, 4)
            for number in range(count):
                shard = {key: tensors[key] for key in keys[number::count]}
                self.shards[f"model-{number + 1:05d}-of-{count:05d}.safetensors"] = shard
            self.listed = {key: name for name, shard in self.shards.items() for key in shard}
        self.others: dict[str, Tensors] = {}

    def any_shard(self) -> str:
        return self.chance.choice(sorted(self.shards))

    def any_key(self) -> tuple[Tensors, str]:
        shard = self.shards[self.any_shard()]
        return shard, self.chance.choice(sorted(shard))

    def write(self) -> None:
        for name, tensors in (self.shards | self.others).items():
            save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, self.path / name, {"format": "pt"})
        if self.listed is not None:
            (self.path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": self.listed}))


def other_values(tensors: Tensors) -> Tensors:
    return {key: tensor + 1 for key, tensor in tensors.items()}


def another_file(folder: Folder) -> None:
    names = ["model-00009-of-00009", "optimizer", "model_ema", "adapter_model", "model.fp16", "a", "zz"]
    name = folder.chance.choice(names)
    folder.others[f"{name}.safetensors"] = other_values(folder.shards[folder.any_shard()])


def duplicate(folder: Folder) -> None:
    shard, key = folder.any_key()
    folder.shards[folder.any_shard()][key] = shard[key] + 1


def swapped_names(folder: Folder) -> None:
    (one, key), (other, further) = folder.any_key(), folder.any_key()
    one[key], other[further] = other[further], one[key]


def dtype(folder: Folder) -> None:
    shard, key = folder.any_key()
    shard[key] = shard[key].to(folder.chance.choice([torch.float64, torch.float16, torch.bfloat16, torch.complex64]))


def all_in_another_dtype(folder: Folder) -> None:
    kind = folder.chance.choice([torch.float64, torch.float16, torch.bfloat16])
    for shard in folder.shards.values():
        shard.update({key: tensor.to(kind) for key, tensor in shard.items()})


def unexpected(folder: Folder) -> None:
    shard, key = folder.any_key()
    shard[folder.chance.choice(["model.norm_of_nothing.weight", "lm_head.bias", "h.7.x", "a\nb", "é"])] = shard[key] + 1


def head_of_its_own(folder: Folder) -> None:
    for shard in folder.shards.values():
        for key in list(shard):
            if key.endswith(("embed_tokens.weight", "wte.weight")):
                head = shard[key] + folder.chance.choice([0, 1])
                if folder.chance.random() < 0.5:
                    del shard[key]
                shard["lm_head.weight"] = head


def index_forgets(folder: Folder) -> None:
    if folder.listed is not None and len(folder.listed) > 1:
        del folder.listed[folder.chance.choice(sorted(folder.listed))]


def index_beside_the_whole(folder: Folder) -> None:
    if folder.listed is None:
        folder.listed = dict.fromkeys(folder.shards[WEIGHTS], "old.safetensors")
        folder.others["old.safetensors"] = other_values(folder.shards[WEIGHTS])


ACCIDENTS = [
    *(another_file, duplicate, swapped_names, dtype, all_in_another_dtype),
    *(unexpected, head_of_its_own, index_forgets, index_beside_the_whole),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, tuple[Path, Tensors]]:
    """Of each kind a folder with a configuration, and the tensors that it is saved with."""
    made = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        make_model(kind, vocabulary=20).save_pretrained(folder)
        made[kind] = folder, load_file(folder / WEIGHTS)
    return made


def outcome(load: Callable[[], PreTrainedModel]) -> tuple[PreTrainedModel | None, object]:
    """What became of loading: a model and what it ignores, or nothing and the one line that said so."""
    try:
        model = load()
    except UserError as error:
        return None, str(error)
    return model, model.ignored_tensors


def same_tensors(one: PreTrainedModel, other: PreTrainedModel) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(
        tensor.dtype == theirs[key].dtype and torch.equal(tensor, theirs[key]) for key, tensor in ours.items()
    )


def load_streamed(name: str) -> PreTrainedModel:
    """With all layers read once."""
    model = stream_model(name)
    model.stream.weights_hash()
    return model


def by_transformers(folder: Path) -> Tensors | None:
    """The parameters as transformers alone loads them; None if it misses some, or cannot."""
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            folder, use_safetensors=True, dtype=torch.float32, output_loading_info=True
        )
    except Exception:
        return None
    return None if report["missing_keys"] or report["mismatched_keys"] else dict(model.named_parameters())


def test_generated_folders(models, tmp_path, caplog):
    """What is loaded is what transformers alone makes of the folder; all loaders find it by the same code."""
    caplog.set_level(logging.CRITICAL)
    loaded = refused = 0
    for seed in range(SEEDS):
        chance = random.Random(seed)
        kind = chance.choice(KINDS)
        place = tmp_path / str(seed) / "model"
        place.mkdir(parents=True)
        source, tensors = models[kind]
        (place / "config.json").write_text((source / "config.json").read_text())
        folder = Folder(place, tensors, chance)
        accidents = chance.choices(ACCIDENTS, k=chance.choice([0, 1, 1, 1, 2]))
        for accident in accidents:
            accident(folder)
        folder.write()
        said = f"{seed} {kind} {[accident.__name__ for accident in accidents]}"
        model, about = outcome(lambda place=place: load_model(str(place)))
        theirs = by_transformers(place)
        if model is None:
            refused += 1
            assert accidents, f"{said}: {about}"
            continue
        ours, loaded = dict(model.named_parameters()), loaded + 1
        assert theirs is not None, said
        assert ours.keys() == theirs.keys(), said
        assert all(torch.equal(tensor, theirs[own]) for own, tensor in ours.items()), said
    assert loaded > SEEDS / 2
    assert refused > SEEDS / 20


class Opened:
    """Counts how often files of a folder are opened by anything, by inotify(7)."""

    OPEN, NONBLOCK = 0x20, 0x800

    def __init__(self, folder: Path):
        self.system = ctypes.CDLL(None)
        self.descriptor = self.system.inotify_init1(self.NONBLOCK)
        self.system.inotify_add_watch(self.descriptor, os.fsencode(folder), self.OPEN)

    def counts(self) -> Counter:
        """By name, since it was asked last."""
        try:
            events, found = os.read(self.descriptor, 1 << 16), Counter()
        except BlockingIOError:
            return Counter()
        while events:
            *_, length = struct.unpack_from("iIII", events)
            found[events[16 : 16 + length].rstrip(b"\0").decode()] += 1
            events = events[16 + length :]
        return found


@pytest.mark.skipif(sys.platform != "linux", reason="needs inotify, which Linux has")
@pytest.mark.parametrize("load", [load_model, load_int8, load_streamed], ids=["resident", "int8", "streamed"])
@pytest.mark.parametrize("kind", ["shards", "gguf", "gptq"])
def test_each_weight_file_is_opened_once(load, kind, tmp_path):
    """From the name to the last layer, however many tensors it holds; each loader makes the same model of it."""
    if kind == "gguf":
        name = save_gguf(make_model("llama"), tmp_path / "model.gguf")
    elif kind == "gptq":
        fields = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}
        name = save_like(tmp_path, fields, lambda weight: gptq(weight, 4)[1])
    else:
        make_model("mixtral").save_pretrained(tmp_path, max_shard_size="20KB")
        name = tmp_path
    files = {file.name for file in tmp_path.iterdir() if file.suffix in (".gguf", ".safetensors")}
    opened = Opened(tmp_path)
    found = load(str(name))
    assert {file: count for file, count in opened.counts().items() if file in files} == dict.fromkeys(files, 1)
    model = load_model(str(name))
    if load is load_streamed:
        assert found.stream.weights_hash() == weights_hash(model)
    else:
        assert same_tensors(found, model if load is load_model else quantize(model, "llm.int8", keep="int8"))


@pytest.fixture
def opt(tmp_path) -> Path:
    """The folder of a small OPT."""
    make_model("opt").save_pretrained(tmp_path / "opt")
    return tmp_path / "opt"


def test_links_of_the_cache_of_the_hub(opt, tmp_path):
    """Its snapshots are folders of links to files that are called by their hashes."""
    repository = tmp_path / "models--some--opt"
    snapshot = repository / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(opt.iterdir())):
        file.rename(repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert outcome(lambda: load_model(str(snapshot)))[0]
    (tmp_path / "short").symlink_to(snapshot)
    assert outcome(lambda: load_model(str(tmp_path / "short")))[0]
    assert outcome(lambda: load_model(str(repository / "blobs")))[0] is None


@pytest.mark.parametrize("has", ["model.safetensors", "an index", "pickles"])
def test_what_is_downloaded(has, opt, tmp_path, monkeypatch):
    """Of a hub id no file that is not the model; of pickled weights, the conversion that the hub has of them."""
    shards = {"model-1[of]2.safetensors", "model-2.safetensors"}
    listed = json.dumps({"weight_map": dict.fromkeys(shards, "x") | dict(zip("ab", sorted(shards), strict=True))})
    listed = listed.replace('"x"', '"model-2.safetensors"')
    revisions = {"model.safetensors": {WEIGHTS: b"", INDEX: listed.encode()}, "an index": {INDEX: listed.encode()}}
    on_hub = {None: revisions.get(has, {}), "refs/pr/1": {WEIGHTS: b""}}
    on_hub[None] |= dict.fromkeys([*shards, "model_ema.safetensors", "pytorch_model.bin"], b"")
    downloaded = set()

    def snapshot_download(_name, revision, allow_patterns, local_files_only) -> str:
        assert not local_files_only
        for name, content in on_hub[revision].items():
            if any(fnmatch.fnmatch(name, pattern) for pattern in allow_patterns):
                downloaded.add(name)
                (tmp_path / name).write_bytes(content)
        return str(tmp_path)

    monkeypatch.setattr(checkpoint, "snapshot_download", snapshot_download)
    monkeypatch.setattr(checkpoint, "auto_conversion", lambda _name: (None, "refs/pr/1", False))
    folder = checkpoint._downloaded(Source("some/opt", None, False), "some/opt")
    assert folder == tmp_path
    expected = {"model.safetensors": {WEIGHTS}, "an index": {INDEX, *shards}, "pickles": {WEIGHTS}}
    assert downloaded == expected[has]


def test_a_norm_that_the_configuration_leaves_out(opt, caplog, tmp_path):
    """An OPT whose configuration says nothing of the final norm that it was trained with: the model is another one."""
    alter_config(opt, _remove_final_layer_norm=True)
    names = ["model.decoder.final_layer_norm.bias", "model.decoder.final_layer_norm.weight"]
    for load in (load_model, stream_model, load_int8):
        caplog.clear()
        assert load(str(opt)).ignored_tensors == names
        (said,) = [record.getMessage() for record in caplog.records if record.name.startswith("outliers")]
        assert said == (
            f"warning: the checkpoint of '{opt}' holds 2 tensors for which its configuration has no place "
            f"({', '.join(names)}); they are ignored"
        )


def test_rows_say_what_was_ignored(tmp_path):
    folder = shutil.copytree(POCKET / "gpt2-0.1m", tmp_path / "m")
    alter_weights(folder, lambda of: of.update({f"x.{number}": torch.ones(1) for number in range(10)}))
    _, rows = trace_model(Tracing(model=str(folder), block=32, blocks=1, stream=True), tmp_path / "out")
    assert {tuple(row["ignored_tensors"]) for row in rows} == {(*(f"x.{number}" for number in range(8)), "… 10 in all")}


HARMLESS = {
    "gpt2": ["h.0.attn.bias", "transformer.h.1.attn.masked_bias"],
    "gpt_neo": ["transformer.h.0.attn.attention.bias", "transformer.h.0.attn.attention.masked_bias"],
    "gpt_neox": ["gpt_neox.layers.0.attention.masked_bias", "gpt_neox.layers.0.attention.rotary_emb.inv_freq"],
    "opt": ["decoder.version", "model.decoder.version"],
    "xglm": ["model.embed_positions.weights"],
}


@pytest.mark.parametrize("kind", HARMLESS)
def test_what_checkpoints_are_known_to_carry_stays_quiet(kind, tmp_path):
    make_model(kind).save_pretrained(tmp_path)
    alter_weights(tmp_path, lambda of: of.update({key: torch.ones(2) for key in HARMLESS[kind]}))
    assert load_model(str(tmp_path)).ignored_tensors == []


EXPERTS = {
    "another number": r"lacks 1 tensors \(.*\.experts\.3\.",
    "more": r"shape \(5, .* asks for \(4, ",
    "another shape of one": r"\.experts\.3\..* with the shape \(\d+, 5\)",
    "another type": "as I8",
}


@in_turn("case of", ["mixtral", "qwen3-moe"], EXPERTS)
def test_experts_that_do_not_fit(case, of, tmp_path):
    make_model(case).save_pretrained(tmp_path)

    def alter(tensors: Tensors) -> None:
        key = next(key for key in tensors if ".experts.3." in key)
        if of == "another number":  # 0, 1, 2 and 7 of four
            tensors[key.replace(".3.", ".7.")] = tensors.pop(key)
        elif of == "more":
            for one in [one for one in tensors if one.startswith(key.partition(".3.")[0]) and ".3." in one]:
                tensors[one.replace(".3.", ".4.")] = tensors[one].clone()
        elif of == "another shape of one":
            tensors[key] = tensors[key][:, :5].clone()
        else:
            tensors[key] = tensors[key].to(torch.int8)

    alter_weights(tmp_path, alter)
    for load in (load_model, stream_model):
        with pytest.raises(UserError, match=EXPERTS[of]):
            load(str(tmp_path))


def test_a_head_of_its_own_survives_int8(tmp_path):
    """Where the configuration says that it is tied, but the checkpoint holds another one: transformers leaves it."""
    make_model("gpt2").save_pretrained(tmp_path)
    alter_weights(tmp_path, lambda of: of.update({"lm_head.weight": of["transformer.wte.weight"] + 1}))
    model = load_model(str(tmp_path))
    assert not torch.equal(model.lm_head.weight, model.transformer.wte.weight)
    small = load_int8(str(tmp_path))
    assert same_tensors(small, quantize(model, "llm.int8", keep="int8"))
    save_quantized(small, tmp_path / "small")
    assert same_tensors(load_quantized(tmp_path / "small"), small)


def first(part: str, alter: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], None]:
    """Alter the first tensor of such a name."""

    def change(tensors: Tensors) -> None:
        key = next(key for key in sorted(tensors) if key.endswith(part))
        tensors[key] = alter(tensors[key])

    return change


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (first("codes", lambda codes: codes[:, :4].clone()), "with the shape"),
        (first("codes", torch.Tensor.float), "as torch.float32; expected torch.int8"),
        (first("scale", torch.Tensor.half), "as torch.float16; expected torch.float"),
        (first("ln_f.weight", torch.Tensor.int), "as torch.int32; expected"),
        (first("ln_f.weight", lambda weight: weight / 0), "hold NaN or inf"),
        (lambda of: of.pop("transformer.ln_f.weight"), "lacks 1 tensors"),
        (lambda of: of.update(further=torch.ones(1)), r"does not have \(further"),
        *((shared, "cannot read an int8 model") for shared in ("5", '{"a": "b"}', '{"a": []}', "{")),
    ],
)
def test_int8_files_that_do_not_fit(alter, message, tmp_path):
    """alter: what tensors become, or what a header says that they share."""
    save_quantized(quantize(make_model("gpt2"), "llm.int8", keep="int8"), tmp_path)
    with safe_open(tmp_path / INT8, "pt") as file:
        header = file.metadata() | ({"shared": alter} if isinstance(alter, str) else {})
    tensors = load_file(tmp_path / INT8)
    if callable(alter):
        alter(tensors)
    save_file(tensors, tmp_path / INT8, header)
    with pytest.raises(UserError, match=message):
        load_quantized(tmp_path)


def test_an_int8_file_that_is_a_pipe(tmp_path):
    os.mkfifo(tmp_path / INT8)
    with pytest.raises(UserError, match="is not a regular file"):
        load_quantized(tmp_path)


@pytest.mark.parametrize(
    ("value", "dtype", "message"),
    [
        (3.4e38, "bfloat16", r"3\.4e\+38, beyond bfloat16, .*: float32$"),
        (1e39, "float32", "1e\\+39, beyond float32, .*expected a smaller weight"),
        (torch.inf, "float16", "hold NaN or inf in"),
    ],
)
def test_weights_that_a_dtype_does_not_hold(value, dtype, message, opt):
    key = "model.decoder.layers.0.fc1.weight"

    def plant(tensors):
        tensors[key] = tensors[key].double()
        tensors[key].view(-1)[5] = value

    alter_weights(opt, plant)
    with pytest.raises(UserError, match=message) as raised:
        perplexity(stream_model(str(opt), dtype), torch.arange(10)[None])
    assert f"'{key}'" in str(raised.value)
