"""A release: what a wheel and a source distribution hold, that they run outside of the clone, and what they say."""

import ast
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint

import pytest
import yaml

import outliers
from tests.conftest import ROOT, read

sys.path.insert(0, str(ROOT / "scripts"))
import release
import stubs

PROJECT = tomllib.loads(read("pyproject.toml"))["project"]
GROUPS = {"console_scripts": PROJECT["scripts"], **PROJECT.get("entry-points", {})}
ENTRY_POINTS = [EntryPoint(name, value, group) for group, named in GROUPS.items() for name, value in named.items()]


def functions() -> Iterator[tuple[str, Callable]]:
    """Public functions, and the public methods and properties of public classes, by their names."""
    for package in stubs.PACKAGES:
        for name in package._HOME:
            value = getattr(package, name)
            members = dict(vars(value)) if inspect.isclass(value) else {"": value}
            for member, one in members.items():
                function = getattr(one, "fget", None) or getattr(one, "__func__", one)
                ours = inspect.isfunction(function) and function.__module__ != "typing"  # which gives protocols one
                if ours and (not member.startswith("_") or member == "__init__"):
                    yield f"{package.__name__}.{name}.{member}".rstrip("."), function


PUBLIC = dict(functions())
needs_distributions = pytest.mark.nightly("pyproject.toml", "scripts/release.py")


# What is in the files


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """The wheel and the source distribution of this clone, made with the hatchling that is installed."""
    pytest.importorskip("build", reason="the extra `dev` is not installed")
    if not (ROOT / ".git").exists():
        pytest.skip("needs a clone, whose files git can list")
    return release.build(tmp_path_factory.mktemp("dist"), "--no-isolation", "--quiet")


@needs_distributions
def test_they_hold_the_files_of_the_clone(distributions):
    assert release.faults(*distributions) == []


@needs_distributions
def test_a_wheel_that_differs_is_noticed(distributions, monkeypatch, constants):
    clone = release.in_clone
    changed = {"outliers/py.typed": 1, "outliers/more.py": 2}
    monkeypatch.setattr(release, "in_clone", lambda *places: clone(*places) | changed)
    wheel, sdist = (file.name for file in distributions)
    constants("release", LARGEST=10**6)
    assert {one for one in release.faults(*distributions) if "outliers/" not in one} == {
        f"{wheel} has more than 1,000,000 bytes",
        f"{sdist} has more than 1,000,000 bytes",
    }
    assert f"{wheel} lacks outliers/more.py" in release.faults(*distributions)
    assert f"{sdist} holds outliers/py.typed, unknown or changed" in release.faults(*distributions)


@needs_distributions
def test_a_wheel_runs_outside_of_the_clone(distributions, tmp_path):
    """Without anything of the clone; the libraries are those of this environment."""
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    release.run([*pip, str(tmp_path / "installed"), str(distributions[0])])
    command = [sys.executable, "-m", "outliers"]
    release.try_out(command, tmp_path / "run", [release.HELP, release.SWEEP], PYTHONPATH=str(tmp_path / "installed"))


# What they say


@needs_distributions
def test_metadata(distributions):
    said = release.metadata(distributions[0])
    assert (said.name, str(said.version), said.license_expression) == ("outliers", outliers.__version__, "Apache-2.0")
    assert said.description_content_type == "text/markdown" and said.description == read("README.md")


def test_the_version_stands_in_one_place():
    assert "version" not in PROJECT and PROJECT["dynamic"] == ["version"]
    assert yaml.safe_load(read("CITATION.cff"))["version"] == outliers.__version__


def test_the_changelog_begins_with_this_version():
    page = read("CHANGELOG.md")
    versions = re.findall(r"^## (\S+) - \d{4}-\d\d-\d\d$", page, re.MULTILINE)
    headings = re.findall(r"^## (?!Unreleased$)", page, re.MULTILINE)
    assert versions[0] == outliers.__version__ and len(set(versions)) == len(headings)


def test_rows_of_another_version_are_found_again(tmp_path, constants):
    made = outliers.sweep(models=[release.MODEL], schemes=["fp32"], block=32, blocks=1, out=tmp_path)
    constants("outliers", __version__="0.0.1")
    assert outliers.sweep(models=[release.MODEL], schemes=["fp32"], block=32, blocks=1, out=tmp_path) == made


def test_links_of_the_changelog_lead_somewhere():
    links = re.findall(r"\]\((?!https:)([^)#]+)", read("CHANGELOG.md"))
    assert links and [link for link in links if not (ROOT / link).exists()] == []


@pytest.mark.parametrize("entry", ENTRY_POINTS, ids=lambda entry: f"{entry.group}-{entry.name}")
def test_entry_points_lead_somewhere(entry):
    assert entry.load()


# Types


@pytest.mark.parametrize("package", stubs.PACKAGES, ids=lambda package: package.__name__)
def test_stubs_are_those_of_the_tables(package):
    assert stubs.stub_file(package).read_text(encoding="utf-8") == stubs.stub(package), "run python scripts/stubs.py"


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_says_its_types(name):
    signature = inspect.signature(PUBLIC[name])
    parameters = [one for one in signature.parameters.values() if one.name not in ("self", "cls")]
    assert [one.name for one in parameters if one.annotation is inspect.Parameter.empty] == []
    assert signature.return_annotation is not inspect.Signature.empty or name.endswith("__init__")


def test_type_checkers_see_every_public_name():
    used = {node.attr for node in ast.walk(ast.parse(read("tests/typed_use.py"))) if isinstance(node, ast.Attribute)}
    assert set(outliers.__all__) - used == set()
