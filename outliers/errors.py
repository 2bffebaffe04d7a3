"""The one exception for a user's mistake."""

import difflib
from collections.abc import Callable, Iterable, Mapping

LONGEST = 900  # characters of a message
LONGEST_VALUE = 80  # characters of a value in one
FEW = 16  # names that a message lists
MOST_NEAR = 3  # near names that a message suggests, at most
BEGINNING = 3  # letters at least that count as the beginning of a name
WITHOUT_VALUE = {"missing": "field '{}' is missing", "extra_forbidden": "unknown field '{}'"}
# By the beginning of the type of a pydantic error; its context fills the braces.
EXPECTED = {
    "int": "expected a whole number",
    "float": "expected a number",
    "finite": "expected a finite number",
    "bool": "expected true or false",
    "string": "expected text",
    "list": "expected a list",
    "tuple": "expected a list",
    "dict": "expected a mapping",
    "model": "expected a mapping of fields",
    "too_short": "expected at least {min_length}",
    "too_long": "expected at most {max_length}",
    "greater_than_equal": "expected {ge} or more",
    "greater_than": "expected more than {gt}",
    "less_than_equal": "expected at most {le:,}",
    "less_than": "expected less than {lt:,}",
    "literal_error": "expected {expected}",
}


class UserError(Exception):
    """A user's mistake in one line: what was wrong, what was expected, what to do.

    The library raises it like any exception; the command line prints its message alone and exits with code 2. Text of
    files or other libraries in it may hold anything: line ends become spaces, characters that no terminal prints are
    escaped, and the middle of a long message is left out.

    Example:
        >>> outliers.quantize(model, "absmx")
        Traceback (most recent call last):
            ...
        outliers.errors.UserError: unknown scheme 'absmx'; did you mean absmax...
    """

    code = 2  # with which a command exits
    field: str | None = None  # of an experiment in which the mistake is, such as "schemes" or "runs.a.steps"

    def __init__(self, message: str):
        line = " ".join(message.split("\n")).strip()
        escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in line)
        half = LONGEST // 2
        super().__init__(escaped if len(escaped) <= LONGEST else f"{escaped[:half]} … {escaped[-half:]}")


class NoOutlier(UserError):
    """A model has no outlier feature to measure."""


class CellsFailed(UserError):
    """Some cells of a run failed; all others are measured and shown."""

    code = 1


class MeasurementFailed(UserError):
    """A measurement failed while it was made."""


class EngineLost(MeasurementFailed):
    """The processes that measure cells ended before a cell was measured, for no fault of the cell.

    BEGINNING: the first words of the message, by which rows that failed so are known.
    """

    BEGINNING = "Ray has ended"
    code = 1


class BadWeights(MeasurementFailed):
    """The weights of a model cannot be used, whatever is measured."""


class ChangedWeights(BadWeights):
    """The weights of a model changed while they were measured; earlier rows stay."""


class BrokenModel(MeasurementFailed):
    """A model computes NaN or inf; callers that know the model and its scheme put their names before the message."""


def not_finite(where: str) -> BrokenModel:
    """Return the error for NaN or inf in a model, with the place where they are."""
    return BrokenModel(
        f"NaN or inf {where}; expected finite numbers: try another dtype (float32, bfloat16) or check the weights"
    )


def unknown_name(kind: str, name: str, known: Iterable[str], hint: str = "") -> UserError:
    """Build the error for a name that is in no table, with the nearest names that are, or all of a few."""
    known = list(known)
    few = known if len(known) <= FEW else _nearest(name, known, least=0)
    expected = suggestion(name, known) or f"{'known' if few == known else 'nearest'}: {', '.join(few)}"
    return UserError(f"unknown {kind} '{name}'; {expected}{' ' + hint if hint else ''}")


def no_such_feature(feature: int, width: int) -> UserError:
    return UserError(f"feature {feature} is out of range; the model's hidden states have features 0 to {width - 1}")


def suggestion(name: str, known: Iterable[str], least: float = 0.5) -> str:
    """Return "did you mean A or B?" of known names that begin like this one, or else of near ones; "" if none is near.

    least: smallest similarity by difflib, from 0 to 1.
    """
    known = list(known)
    longer = [other for other in known if len(name) >= BEGINNING and other.lower().startswith(name.lower())]
    near = sorted(longer, key=len)[:MOST_NEAR] or _nearest(name, known, least)
    return f"did you mean {' or '.join(near)}?" if near else ""


def _nearest(name: str, known: list[str], least: float) -> list[str]:
    """Return the names that are most similar, whatever their case."""
    by_letters = {other.lower(): other for other in known}
    near = difflib.get_close_matches(name.lower(), by_letters, n=MOST_NEAR, cutoff=least)
    return [by_letters[letters] for letters in near]


def mistake_in(details: Mapping) -> str:
    """Describe a mistake in a field from the details of a pydantic error."""
    field = ".".join(str(part) for part in details["loc"] if "[" not in str(part))  # without the types of a union
    kind = details["type"]
    if not field:
        return "it has no fields"
    if kind in WITHOUT_VALUE:
        return WITHOUT_VALUE[kind].format(field)
    context = details.get("ctx", {})
    expected = next((words for start, words in EXPECTED.items() if kind.startswith(start)), "expected another value")
    expected = expected.format(**context).replace("'", "") if kind != "value_error" else str(context["error"])
    return f"field '{field}': {expected}, got {shown(details['input'])}"


def joined_names(names: list, most: int = 3) -> str:
    """Join names by commas, with "…" in the place of those beyond `most`."""
    return ", ".join(map(str, names[:most])) + (", …" if len(names) > most else "")


def reason_of(error: BaseException, most: int) -> str:
    """Return the message of another library's error in a line of at most so many characters, or its type."""
    if isinstance(error, RecursionError):
        return "nested too deeply"
    return " ".join(str(error).split())[:most] or type(error).__name__


def reason_of_transformers(error: BaseException, most: int) -> str:
    """Return the message of an error of transformers as `reason_of`; its KeyErrors hold the unknown name alone."""
    return "transformers knows no " * isinstance(error, KeyError) + reason_of(error, most)


def shown(value: object, write: Callable[[object], str] = repr) -> str:
    """Write a value for a message, as Python or another notation does; shorten a long one."""
    try:
        text = write(value)
    except ValueError:  # a whole number of thousands of digits
        text = "a number of too many digits"
    return text if len(text) <= LONGEST_VALUE else f"{text[:LONGEST_VALUE]}…"
