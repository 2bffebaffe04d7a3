"""Configurations of models whose weights nobody needs to download: those of the paper, and their families."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

if TYPE_CHECKING:
    from transformers import PretrainedConfig

FILE = Path(__file__).with_suffix(".yaml")


@cache
def known_configs() -> dict[str, dict]:
    """Hub id to the fields of `configs.yaml`, family by family."""
    return yaml.safe_load(FILE.read_text(encoding="utf-8"))


def find_config(name: str) -> "PretrainedConfig":
    """The configuration of a known model, without network; else that of a hub id, a local folder or a pocket model.

    Of any architecture, also one that is in no row of the anatomy table.
    """
    from transformers import AutoConfig  # late, for the names alone serve tables

    from outliers.models.load import read_config

    if name not in known_configs():
        return read_config(name)
    fields = {field: value for field, value in known_configs()[name].items() if field != "shown"}
    return AutoConfig.for_model(**fields)
