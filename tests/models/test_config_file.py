"""What a configuration may ask for, and what is looked at before torch and transformers are imported."""

import json
import shutil
import socket
import threading
import time

import pytest
import torch
from huggingface_hub import HfApi
from transformers import AutoConfig

from outliers import Cells, UserError, load_int8, load_quantized, run, save_quantized
from outliers.models import source
from outliers.models.anatomy import part_config
from outliers.models.config_file import check_fields, least_weights
from outliers.models.load import find_config, load_config, load_model, load_tokenizer
from outliers.models.names import POCKET, known_configs
from outliers.models.skeleton import skeleton
from outliers.models.source import ask_hub, find_model
from tests.commands.test_commands import answers
from tests.conftest import CONFIGS, VARIANTS, every_kind
from tests.metrics.test_memory import ABOUT, PARAMETERS
from tests.small_models import alter_config
from tests.typed import call, refused

SMALL_FIELDS = CONFIGS | VARIANTS
ASK_HUB = HfApi.model_info


@pytest.fixture
def folder(tmp_path):
    """A copy of a pocket model to break."""
    return shutil.copytree(POCKET / "gpt2-0.1m", tmp_path / "model")


def passes(config) -> int:
    """A configuration passes as it is, and as the file that is made of it; its weights, no more than counted."""
    check_fields(config.to_dict(), "here")
    fields = json.loads(config.to_json_string(use_diff=False))
    check_fields(fields, "here")
    count = skeleton(part_config(config), torch.bfloat16).num_parameters()
    assert 1 / 3 < least_weights(part_config(config).to_dict()) / count <= 1
    return count


@every_kind
def test_small_models_pass(case):
    kind, fields = SMALL_FIELDS[case]
    check_fields({"model_type": kind, **fields}, "here")
    passes(AutoConfig.for_model(kind, vocab_size=100, pad_token_id=None, **fields))


@pytest.mark.parametrize("name", known_configs())
def test_published_models_pass(name):
    count = passes(find_config(name))
    assert count == PARAMETERS[name] if name in PARAMETERS else count == pytest.approx(ABOUT[name], rel=0.022)


@pytest.mark.parametrize(
    "fields",
    [
        {"num_hidden_layers": 126, "hidden_size": 16384, "num_attention_heads": 128, "intermediate_size": 53248},
        {"max_position_embeddings": 10_485_760, "vocab_size": 262_208},
        {"pad_token_id": -1, "eos_token_id": [1, 2], "vocab_size": 32_000},
        {"hidden_size": 2304, "num_attention_heads": 7, "head_dim": 256},
    ],
)
def test_what_published_models_have_passes(fields):
    check_fields({"model_type": "llama", **fields}, "here")


def test_what_transformers_computed_is_not_blamed_on_the_file(folder):
    for fields in ({"sliding_window": None}, {"sliding_window": 0, "use_sliding_window": False}, {}):
        (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_moe", **fields}))
        assert find_config(str(folder)).sliding_window == 0


def test_how_a_model_computes_is_not_the_files_to_say(folder):
    """Attention and what a model puts out; the numbers are those without these fields."""
    plain = load_model(str(folder))
    alter_config(
        folder, attn_implementation="kernels-community/flash-attn", return_dict=False, output_hidden_states=True
    )
    alter_config(folder, auto_map={"AutoModelForCausalLM": "evil.Model"}, experts_implementation="sonicmoe")
    ours, ids = load_model(str(folder)), torch.arange(20)[None]
    assert ours.config._attn_implementation == plain.config._attn_implementation == "sdpa"
    assert torch.equal(ours(ids).logits, plain(ids).logits)
    assert ours(ids).hidden_states is None


def test_int8_models_on_disk_are_looked_at_too(tmp_path):
    save_quantized(load_int8("pocket/gpt2-0.1m"), tmp_path)
    before = load_quantized(tmp_path).config._attn_implementation
    alter_config(tmp_path, attn_implementation="eager")
    assert load_quantized(tmp_path).config._attn_implementation == before
    alter_config(tmp_path, n_layer=10**9)
    with pytest.raises(UserError, match="asks for n_layer"):
        load_quantized(tmp_path)


def test_mistakes_show_before_heavy_imports(folder, tmp_path):
    alter_config(folder, n_layer=0)
    said = {
        "trace /nowhere": "model folder '/nowhere' does not exist",
        "trace no-such-user/no-such-model": "cannot reach the hub to load 'no-such-user/no-such-model'",
        "trace pocket/gpt2-0.1m --text c4": "cannot load 'allenai/c4' from the hub",
        f"trace {folder}": "asks for n_layer 0",
        "report nope": "cannot reach the hub to load 'nope'",
        "anatomy nope": "cannot reach the hub to load 'nope'",
        "origins pocket/gpt2-0.1m --features 3,9999": "feature 9999 is out of range; the model's hidden states have",
        "training training/causes": "text file 'c4_en_1000.jsonl' does not exist",
    }
    typed = [f"outliers.{line}".split() for line in said]
    found = answers(typed, HF_HOME=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
    for (code, out, err, imported), (line, message) in zip(found, said.items(), strict=True):
        assert (code, out) == (2, "")
        assert err.startswith("error: ") and message in err and err.count("\n") == 1
        quick = {"torch"} if line.startswith("training") else {"torch", "transformers", "datasets", "numpy", "pandas"}
        assert not quick & {*imported}


@pytest.fixture
def hub(monkeypatch, constants, tmp_path):
    """A cache of the hub's client that is empty, and a hub that nobody has asked yet, and that nobody reaches."""
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", no_network)
    constants("huggingface_hub.constants", HF_HUB_CACHE=str(tmp_path / "hub"))
    constants("outliers.models.source", _silent_since=-float("inf"))
    source._see_on_hub.cache_clear()
    yield tmp_path / "hub"
    source._see_on_hub.cache_clear()


def test_a_hub_that_does_not_answer(hub, monkeypatch, constants):
    """It takes the connection, and says nothing. It is asked once, and not for longer than it may take."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        accepted = []
        threading.Thread(target=lambda: accepted.append(server.accept()), daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}"

        def asked(_hub, name, **_options):
            return ASK_HUB(HfApi(endpoint=address), name, timeout=60)

        monkeypatch.setattr("huggingface_hub.HfApi.model_info", asked)
        constants("outliers.models.source", SECONDS_FOR_THE_HUB=1)
        start = time.monotonic()
        for name in ("gpt2", "facebook/opt-125m"):
            with pytest.raises(UserError, match=f"cannot reach the hub to load '{name}'"):
                find_model(name)
        assert 1 <= time.monotonic() - start < 30, "the client's own limit is 60"
        assert len(accepted) == 1


def test_the_hub_is_asked_once_for_a_model(hub, lacking, calls_of):
    lacking("huggingface_hub.HfApi.model_info")
    asked = calls_of("huggingface_hub.HfApi.model_info")
    assert find_model("gpt2") == find_model("gpt2") == ("gpt2", None, False, None, False)
    assert len(asked) == 1
    assert find_model("gpt2", "step1000") == ("gpt2", "step1000", False, None, False), "by branch, see find_model"
    with pytest.raises(ZeroDivisionError):
        ask_hub(lambda _: 1 / 0)


def no_network(*_arguments, **_options):
    """What the hub's client does without network."""
    raise ConnectionError("Name or service not known")


def test_the_cache_is_looked_into_without_network(hub):
    snapshot = hub / "models--some--model" / "snapshots" / "abc"
    shutil.copytree(POCKET / "gpt2-0.1m", snapshot)
    (hub / "models--some--model" / "refs").mkdir()
    (hub / "models--some--model" / "refs" / "main").write_text("abc")
    assert find_model("some/model").local_files_only
    alter_config(snapshot, n_layer=0)
    with pytest.raises(UserError, match="asks for n_layer 0"):
        load_config("some/model")
    with pytest.raises(UserError, match=r"cannot reach the hub to load 'other/model'.*pocket/gpt2-0\.1m"):
        find_model("other/model")


@pytest.mark.parametrize("kind", ["a file", "a link to itself"])
def test_a_cache_that_cannot_be_entered(hub, monkeypatch, capsys, kind):
    hub.write_text("") if kind == "a file" else hub.symlink_to(hub)
    for arguments in (["gpt2"], ["pocket/gpt2-0.1m", "--text", "c4"]):
        said = refused(monkeypatch, capsys, *arguments, command="trace")
        assert said.startswith(f"the hub's cache '{hub}' cannot be entered (")


def test_a_configuration_is_read_once_until_it_changes(folder, calls_of):
    """By this project, and by transformers, for the configuration, the tokenizer and the model."""
    reads = calls_of("outliers.models.config_file.start_of"), calls_of("transformers.PretrainedConfig._get_config_dict")
    for load in (load_config, load_tokenizer, load_model, load_config):
        load(str(folder))
    assert list(map(len, reads)) == [1, 1]
    load_config(str(folder)).n_layer = 0
    assert load_config(str(folder)).n_layer == 2, "each has an object of its own"
    alter_config(folder, layer_norm_epsilon=0.125)
    assert load_config(str(folder)).layer_norm_epsilon == 0.125
    assert list(map(len, reads)) == [2, 2]


def test_a_run_finds_a_model_and_reads_its_tokenizer_once(tmp_path, calls_of):
    """And the next run in this process again, as the folder may hold another model by then."""
    folder = shutil.copytree(POCKET / "gpt2-0.1m", tmp_path / "model")
    tokenizers = calls_of("outliers.models.load.read_folder_tokenizer")
    places = calls_of("outliers.models.source.find_model")
    for number in (1, 2):
        for metric in ("trace", "token_losses"):
            run(Cells(models=[str(folder)], metrics=[metric], block=32, blocks=2), tmp_path / f"{metric}{number}")
    assert len(tokenizers) == len(places) == 4


def test_debug_shows_what_a_library_said(folder, monkeypatch, capsys):
    alter_config(folder, model_type="gpt9")
    code, _, shown = call(monkeypatch, capsys, str(folder), "--debug", command="trace")
    assert code == 2
    assert shown.startswith("Traceback")
    assert "transformers/models/auto/configuration_auto.py" in shown
    assert "unknown architecture 'gpt9'" in shown.splitlines()[-1]
