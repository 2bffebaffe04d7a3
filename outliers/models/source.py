"""The location of a model, on this machine or on the hub, found without importing torch or transformers."""

import functools
import os
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from importlib import import_module
from os.path import lexists
from pathlib import Path
from types import ModuleType
from typing import NamedTuple, TypeVar

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from outliers.errors import UserError, suggestion, unknown_name
from outliers.models.config_file import FILE
from outliers.models.names import (
    PACKAGED,
    POCKET,
    WITH_ADAPTER,
    normalized_name,
    not_here,
    packaged_file,
    packaged_models,
    pocket_models,
    without_adapter,
)
from outliers.models.weight_files import ADAPTER, INDEX, WEIGHTS, listed_shards, weight_files

# Formats of files that are a whole model, by suffix, and the package beside this file that reads them.
FORMATS = {".gguf": "gguf"}
SECONDS_FOR_THE_HUB = 3  # until it counts as unreachable
ALIKE = 0.75  # least similarity to a local name that counts as a misspelling
SECONDS_OF_SILENCE = 60  # during which an unreachable hub is not asked again

Answer = TypeVar("Answer")
_silent_since = -float("inf")


class Source(NamedTuple):
    """The location of a model.

    path: a folder, or a repository on the hub. file: the file in the folder that is the whole model, if there is one.
    adapter: whether to merge the adapter beside its weights.
    """

    path: str
    revision: str | None
    local_files_only: bool
    file: str | None = None
    adapter: bool = False

    @property
    def format(self) -> ModuleType | None:
        """The module that reads the file; None for a folder or repository with a config.json."""
        return import_module(f"outliers.models.{FORMATS[Path(self.file).suffix.lower()]}") if self.file else None

    @property
    def files(self) -> list[Path]:
        """The files of the weights on this machine, outside the hub's cache."""
        if self.file:
            return [Path(self.path) / self.file]
        return weight_files(Path(self.path)) if Path(self.path).is_dir() else []


def local_place(name: str) -> Path | None:
    """Return where a model is on this machine; None if `name` is of the hub.

    That is the folder of a pocket model, the file of a packaged one, or an existing folder or GGUF file of this name.
    """
    given = without_adapter(name)
    name = normalized_name(given)
    if name.startswith("pocket/"):
        if name not in pocket_models():
            raise unknown_name("model", given, local_names())
        return POCKET / name.removeprefix("pocket/")
    if name in PACKAGED:
        if not (file := packaged_file(name)):
            raise not_here(name)
        return file
    place = Path(name)
    if place.is_dir() or place.suffix.lower() not in FORMATS:
        return place if place.is_dir() else None
    if not place.is_file():
        raise UserError(f"model file '{name}' does not exist, or is not a file; expected a GGUF file")
    return place


def local_names() -> list[str]:
    """Return the names of pocket models, and of the packaged models on this machine."""
    return [*pocket_models(), *packaged_models()]


def find_model(name: str, revision: str | None = None) -> Source:
    """Find the model `name`: a pocket or packaged model, an existing folder or GGUF file, or a repository on the hub.

    A folder without safetensors files may contain a GGUF file. A revision of a folder is a model folder in it, such as
    a training checkpoint.

    The hub is asked once, with a time limit, so that a machine without network falls back to its cache at once instead
    of retrying for half a minute.

    Raises:
        UserError: nothing of that name is known, local_names or on the hub; or the hub does not answer, and its cache
            has nothing of that name, or cannot be entered.
    """
    if place := local_place(name):
        if revision is not None and not (place / revision / FILE).is_file():
            checkpoints = sorted(file.parent.name for file in place.glob(f"*/{FILE}"))
            if not checkpoints:
                raise UserError(f"'{name}' is a local model and has no revision '{revision}'; leave the revision out")
            raise unknown_name(f"revision (a folder in '{name}')", revision, checkpoints)
        if place.is_dir():
            place /= revision or ""
            place = _gguf_in(place) or place
        adapted = without_adapter(name) != name
        if adapted and not lexists((place if place.is_dir() else place.parent) / ADAPTER):
            raise UserError(f"'{without_adapter(name)}' has no {ADAPTER}; leave --adapter out, or copy one beside it")
        if adapted and not place.is_dir():
            raise UserError(f"'{place}' is a GGUF file, into which no adapter is merged; expected safetensors")
        if place.is_dir():
            return Source(str(place), None, True, adapter=adapted)
        return Source(str(place.parent), None, True, place.name)
    if (file := Path(name)).is_file():
        expected = f"its folder, '{file.parent}'" if (file.parent / FILE).is_file() else "a model folder or a GGUF file"
        raise UserError(f"'{name}' is a file; expected {expected}")
    if name.endswith(WITH_ADAPTER):
        raise UserError(f"'{name}' asks for an adapter beside the weights of a model of the hub; expected a folder")
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise UserError(
            f"model folder '{name}' does not exist; expected a folder with config.json and safetensors, or a GGUF file"
        )
    check_hub_cache()
    try:
        _see_on_hub(name, revision)
        # Not pinned to the commit that the hub names: transformers looks for the hub's own safetensors conversion of a
        # pickled checkpoint (all of OPT) only where it is asked for the branch.
        return Source(name, revision, False)
    except RevisionNotFoundError:
        raise UserError(f"model '{name}' has no revision '{revision}' on the hub") from None
    except GatedRepoError:
        raise UserError(f"model '{name}' is gated: accept its terms on the hub and run `hf auth login`") from None
    except (RepositoryNotFoundError, HFValidationError):
        raise unknown_name("model", name, local_names(), "(neither a folder nor a repository on the hub)") from None
    except Exception:  # each version of the hub's client raises its HTTP library's own errors when it has no network
        if _cached_config(name, revision) is None:
            raise out_of_reach(name) from None
        return Source(name, revision, True)


def out_of_reach(name: str) -> UserError:
    """Return the error for a hub model that is not cached while the hub cannot be reached."""
    if near := suggestion(name, dict.fromkeys([*local_names(), *PACKAGED]), ALIKE):
        return UserError(f"no model '{name}' is on this machine; {near} The hub, which may have it, cannot be reached")
    return UserError(
        f"cannot reach the hub to load '{name}', and it is not in the local cache; check the network or use "
        f"a local folder or one of {', '.join(local_names())}"
    )


@functools.cache
def _see_on_hub(name: str, revision: str | None) -> None:
    """Raise the error of the hub's client if a model does not exist; each model is requested only once."""
    ask_hub(lambda hub: hub.model_info(name, revision=revision, timeout=SECONDS_FOR_THE_HUB))


def ask_hub(question: Callable[[HfApi], Answer]) -> Answer:
    """Return the hub's answer to a question; raise what its client raises, or TimeoutError after `SECONDS_FOR_THE_HUB`.

    The client's own time limit applies to each address of the hub and each part of an exchange, and none to resolving
    the addresses. So the client runs in a thread, which is abandoned if it does not return.
    """
    global _silent_since
    if time.monotonic() - _silent_since < SECONDS_OF_SILENCE:
        raise TimeoutError("the hub did not answer")
    answer: Future[Answer] = Future()

    def ask() -> None:
        try:
            answer.set_result(question(HfApi()))
        except Exception as error:
            answer.set_exception(error)

    threading.Thread(target=ask, daemon=True).start()
    if wait([answer], SECONDS_FOR_THE_HUB).not_done:
        _silent_since = time.monotonic()
        raise TimeoutError("the hub did not answer")
    return answer.result()


def check_hub_cache() -> None:
    """Raise UserError if the hub's cache exists and cannot be entered."""
    try:
        with os.scandir(constants.HF_HUB_CACHE):
            pass
    except FileNotFoundError:  # nothing was ever downloaded
        pass
    except OSError as error:
        raise UserError(
            f"the hub's cache '{constants.HF_HUB_CACHE}' cannot be entered ({error.strerror}); expected a folder: set "
            "HF_HOME to one"
        ) from None


def _cached_config(name: str, revision: str | None, file: str = FILE) -> Path | None:
    """Return a model's configuration, or another file, in the hub's cache; None if it is not cached."""
    try:
        cached = try_to_load_from_cache(name, file, revision=revision)
    except OSError as error:
        raise UserError(f"the hub's cache of '{name}' cannot be read ({error.strerror}); remove or repair it") from None
    return Path(cached) if isinstance(cached, str) else None


def config_path(source: Source) -> Path | None:
    """Return a model's `config.json`, downloaded if necessary; None if the hub has none."""
    if Path(source.path).is_dir():
        return Path(source.path) / FILE
    return file_of(source, FILE)


def file_of(source: Source, name: str, download: bool = True) -> Path | None:
    """Return a file of a model on this machine, or None.

    download: whether to download a file of a hub model that is not cached.
    """
    if Path(source.path).is_dir():
        file = Path(source.path) / name
        return file if file.is_file() else None
    if source.local_files_only or not download:
        return _cached_config(source.path, source.revision, name)
    return _downloaded(source, name)


@functools.cache
def _downloaded(source: Source, name: str) -> Path | None:
    try:
        return Path(hf_hub_download(source.path, name, revision=source.revision, etag_timeout=SECONDS_FOR_THE_HUB))
    except LocalEntryNotFoundError:  # the hub is gone again
        raise out_of_reach(source.path) from None
    except HfHubHTTPError:  # there is no such file, or the hub refuses it: transformers says so
        return None
    except OSError as error:
        raise UserError(
            f"cannot write to the hub's cache '{constants.HF_HUB_CACHE}' ({error.strerror or error}); set HF_HOME to a "
            "folder that can be written"
        ) from None


def local_files(name: str, revision: str | None = None) -> list[Path]:
    """Return the files of a local model's weights; none for a hub model."""
    return find_model(name, revision).files if local_place(name) else []


def _gguf_in(folder: Path) -> Path | None:
    """Return the GGUF file that is the model of a folder; None if there are safetensors files, or no GGUF file.

    Hidden files are ignored, because macOS creates some.
    """
    files = [file for file in sorted(folder.glob("*")) if file.suffix.lower() in FORMATS and file.name[0] != "."]
    if not files or any(folder.glob("*.safetensors")):
        return None
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise UserError(f"'{folder}' holds {len(files)} GGUF files ({names}); name one of them as the model")
    return files[0]


def missing_download(model: str, revision: str | None) -> int | None:
    """Return the bytes of weights that are not on this machine; None if the hub cannot be asked and nothing is
    cached."""
    if local_place(model):
        return 0
    cached = _cached(model, revision)
    try:
        options = {"revision": revision, "files_metadata": True, "timeout": SECONDS_FOR_THE_HUB}
        info = ask_hub(lambda hub: hub.model_info(model, **options))
        sizes = {file.rfilename: file.size or 0 for file in info.siblings}
    except Exception:  # each version of the hub's client raises its HTTP library's own errors when it has no network
        return 0 if cached else None
    for suffix in (".safetensors", ".bin"):  # pickled weights are converted by the hub, to files of their size
        files = {name: count for name, count in sizes.items() if name.endswith(suffix) and "/" not in name}
        whole = {name: count for name, count in files.items() if name == WEIGHTS}
        shards = {name: count for name, count in files.items() if re.search(r"-\d+-of-\d+\.", name)}
        if files:
            return sum(count for name, count in (whole or shards or files).items() if name not in cached)
    return None


def is_cached(model: str) -> bool:
    """Return whether weights of a model are in the hub's cache, without asking the hub."""
    return bool(_cached(model, None))


def _cached(model: str, revision: str | None) -> set[str]:
    """Return the names of a model's weight files that are in the hub's cache."""
    config = _cached_config(model, revision)
    if config is None or not (lexists(config.with_name(WEIGHTS)) or lexists(config.with_name(INDEX))):
        return set()
    names = [WEIGHTS] if lexists(config.with_name(WEIGHTS)) else listed_shards(config.parent)
    return {name for name in names if config.with_name(name).is_file()}
