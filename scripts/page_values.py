"""The values of the numbers in README and docs, named in results/kept/values.yaml.

A value has an expression and, if it is no whole number or text, a format: `NAME: EXPRESSION` or
`NAME: {value: EXPRESSION, format: FORMAT}` in a group of names. Expressions are Python with `FUNCTIONS`. A value may
be a table, a series, a mapping or a list; a reference such as `caches.increase[kv=int4]` then says which item it means.
"""

import re
from ast import literal_eval
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import pandas as pd
import yaml

import outliers
from outliers.show.spreadsheet import read_csv
from outliers.views.perplexity import costs_of_variants

ROOT = Path(__file__).parent.parent
KEPT = ROOT / "results/kept"
REFERENCE = re.compile(r"(?P<name>[\w.]+)(?P<keys>(?:\[[^\]]*\])*)(?::(?P<format>[^{}]*))?")


class Values:
    """The named values of a file, each computed when it is first asked for."""

    def __init__(self, groups: dict[str, dict[str, str | dict[str, str]]]) -> None:
        self.fields = {
            f"{group}.{name}": {"value": one} if isinstance(one, str) else one
            for group, values in groups.items()
            for name, one in values.items()
        }
        self.computed: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        """Compute a value.

        Raises:
            LookupError: there is no value of this name.
        """
        if name not in self.fields:
            raise LookupError(f"no value is named {name}")
        if name not in self.computed:
            try:
                self.computed[name] = eval(self.fields[name]["value"], FUNCTIONS | {"value": self.__getitem__})
            except Exception as error:
                error.add_note(f"in the value {name}")
                raise
        return self.computed[name]

    def unused(self, references: Iterable[str]) -> set[str]:
        """Return the names that neither references nor other values use."""
        expressions = " ".join(one["value"] for one in self.fields.values())
        named = {*re.findall(r'value\("([\w.]+)"\)', expressions), *(re.split(r"[\[:]", one)[0] for one in references)}
        return self.fields.keys() - named

    def text(self, reference: str) -> str:
        """Return what a page shows for a reference, NAME[KEY]…:FORMAT; without a format, in that of the value.

        Raises:
            LookupError: there is no such value, or it has no such item.
            ValueError: this is no reference, or its value cannot be shown in this format.
        """
        if not (parts := REFERENCE.fullmatch(reference)):
            raise ValueError(f"{{{reference}}} is no reference to a value")
        found = self[parts["name"]]
        for key in re.findall(r"\[([^\]]*)\]", parts["keys"]):
            found = item(found, key, reference)
        found = found.item() if isinstance(found, np.generic) else found
        form = parts["format"] or self.fields[parts["name"]].get("format", "")
        if not isinstance(found, (str, int, float)) or (isinstance(found, float) and not form):
            raise ValueError(f"{{{reference}}} is {found!r}; expected text, a whole number, or a number with a format")
        return found if isinstance(found, str) else format(found, form).replace("-", "−")


def item(of: Any, key: str, reference: str) -> Any:
    """Return an item of a value: of lists by number, of tables by row and then by column, of others by key.

    Raises:
        LookupError: there is no such item.
    """
    try:
        if isinstance(of, (pd.DataFrame, pd.Series)):
            return of.loc[key if of.index.inferred_type != "integer" else int(key)]
        if not isinstance(of, dict):
            return of[int(key)]
        return of[key]
    except (LookupError, ValueError):
        raise LookupError(f"{{{reference}}} has no item {key}") from None


@cache
def _table(file: str) -> pd.DataFrame:
    path = KEPT / file if (KEPT / file).exists() else ROOT / file
    if path.is_dir():
        return outliers.frame(path, provenance=True)
    if path.suffix == ".csv":
        return read_csv(path)
    read = yaml.safe_load(path.read_text(encoding="utf-8"))  # JSON too
    return pd.DataFrame(read.get("rows", [read]))


def kept(file: str, *by: str, **where: Any) -> pd.DataFrame:
    """Return a table: the rows in a folder, or a CSV, JSON or YAML file, below results/kept or the repository.

    Args:
        by: fields that become the index, as text.
        where: the value, or a list of values, that a field of the rows must have.

    Raises:
        LookupError: no row has these values.
    """
    found = _table(file)
    for name, value in where.items():
        found = found[found[name].isin(value if isinstance(value, (list, range)) else [value])]
    if found.empty:
        raise LookupError(f"no row of {file} has {where}")
    index = [found[name].convert_dtypes().astype(str) for name in by]  # a feature is 247, beside rows without one too
    return found.set_index(index) if by else found.reset_index(drop=True)


def settings(folder: str) -> dict[str, Any]:
    """Return the fields that have one value in all rows of a folder that have them."""
    values = {name: column.dropna() for name, column in _table(folder).items()}
    return {name: column.iloc[0] for name, column in values.items() if len(column.astype(str).unique()) == 1}


def found(file: str, pattern: str) -> list[int | str]:
    """Return the numbers of the one place of a file of the repository that a pattern matches; with a point, as text."""
    (one,) = re.finditer(pattern, (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    return [text if "." in text else int(text.replace(",", "")) for text in one.groups()]


def rise(ratios: Any) -> Any:
    """Return by how many per cent something grows that is multiplied by these."""
    return 100 * (ratios - 1)


def bars(folder: str) -> dict[str, float]:
    """Return the bar of the increase of perplexity under each variant in a kept run, in per cent."""
    rows = outliers.frame(KEPT / folder).to_dict("records")
    return {row["variant"]: 100 * row["cost"].shown[1] for row in costs_of_variants(rows)}


FUNCTIONS: dict[str, Callable | Any] = {
    **{one.__name__: one for one in (kept, settings, found, rise, bars, literal_eval)},
    "code": resolve_name,
    "np": np,
    "pd": pd,
    "KEPT": KEPT,
    "ROOT": ROOT,
}


def read_values() -> Values:
    return Values(yaml.safe_load((KEPT / "values.yaml").read_text(encoding="utf-8")))
