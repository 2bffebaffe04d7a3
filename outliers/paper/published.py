"""Artefacts of the paper, and the comparison of measured with published numbers.

The paper is LLM.int8() (Dettmers et al., 2022, arXiv:2208.07339); its numbers stand in `outliers/published`.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import pandas as pd

from outliers.config.experiment import Experiment
from outliers.published.numbers import CellKey
from outliers.show.section import View
from outliers.show.tables import MISSING, Table

BLOG = "bitsandbytes integration blog"  # huggingface.co/blog/hf-bitsandbytes-integration


class Published(NamedTuple):
    """The numbers of one table or figure of the paper.

    key_fields: the fields that make a key, such as model and scheme. values: the numbers by key. form: format string of
    a number.
    """

    source: str
    key_fields: tuple[str, ...]
    values: dict[CellKey, float | str]
    form: str = "{:.4g}"


class Artefact(NamedTuple):
    """A table or figure of the paper, or of an experiment beyond it.

    kind: the class of its experiments. published: its printed numbers, if any. measured: a function that turns our rows
    into records with a `value` and the fields that form its key; None if we do not measure the same quantity. view: the
    view of its rows; None for that of `kind`.
    """

    label: str
    kind: type[Experiment]
    published: Published | None = None
    measured: Callable[[list[dict]], Iterable[Mapping]] | None = None
    view: View | None = None

    def ours(self, rows: list[dict]) -> dict[CellKey, float | str]:
        """Return our measured values by the keys of the published ones."""
        records = self.measured(rows) if rows and self.measured else ()
        return {tuple(str(record[key]) for key in self.published.key_fields): record["value"] for record in records}


def comparison(artefact: str, published: Published, measured: dict[CellKey, float | str]) -> Table:
    """Make a table of every published value, the measured value if there is one, and measured − published.

    Measured values without a published counterpart follow at the end if their model (in Table 5, their way to multiply)
    is published under other settings. artefact: name of the table or figure. measured: values by the keys of the
    published ones. Texts are compared as "same" or "other".
    """
    subjects = {key[0] for key in published.values}
    keys = [*published.values, *(key for key in measured if key[0] in subjects and key not in published.values)]
    records = []
    for key in keys:
        ours, theirs = measured.get(key), published.values.get(key)
        records.append([*key, ours, theirs, _difference(ours, theirs)])
    signed = published.form.replace("{:", "{:+")
    cells = [
        [*map(str, key), _text(ours, published.form, "not run"), _text(theirs, published.form), _text(more, signed)]
        for *key, ours, theirs, more in records
    ]
    headers = [*published.key_fields, "measured", "published", "difference"]
    return Table(
        f"{artefact}_published",
        f"Measured beside published ({published.source}).",
        headers,
        cells,
        pd.DataFrame(records, columns=headers),
        texts=len(published.key_fields),
        folded=not set(measured) & set(keys),
    )


def _difference(ours: float | str | None, theirs: float | str | None) -> float | str | None:
    if ours is None or theirs is None:
        return None
    if isinstance(theirs, str) or isinstance(ours, str):
        return "same" if ours == theirs else "other"
    return ours - theirs


def _text(value: float | str | None, form: str, missing: str = MISSING) -> str:
    return missing if value is None else value if isinstance(value, str) else form.format(value)
