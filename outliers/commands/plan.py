"""Few projections that stay exact, so that a scheme costs at most a given share of perplexity."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from outliers.commands import Command
from outliers.config.experiment import BLOCKS, CALIBRATED, Experiment
from outliers.config.fields import DRAWS, NONE, Count, Line, Model, Name, OneScheme, Several, Share, Split, Unique
from outliers.criterion import check_share
from outliers.errors import unknown_name
from outliers.quantization.plans.plan import Plan
from outliers.quantization.schemes import Scheme, get_scheme
from outliers.runs.stages.plan import (
    DRAWS_OF_A_SET,
    Search,
    check_search,
    exports_of,
    passes_of,
    plan_of,
    plan_stages,
)
from outliers.subjects import cell
from outliers.subjects.causal import ModelWithText
from outliers.terminal.progress import with_bar
from outliers.variants.quantized import Quantized

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel

    from outliers.quantization.magnitudes import Calibration

BY = ("count", "parameters")


class ConsecutiveBlocks(ModelWithText):
    """A model with consecutive blocks of a text; schemes are calibrated on later blocks than any that is measured.

    experiment: its `blocks` is the number of all measured blocks. first, count: number of the first block, from 0, and
    of the blocks.
    """

    def __init__(self, experiment: "Planning", first: int, count: int):
        super().__init__(experiment.model, experiment.revision, experiment)
        self.first, self.count = first, count

    @property
    def request(self) -> dict:
        return super().request | {"blocks": self.count} | ({"first_block": self.first} if self.first else {})

    @property
    def span(self) -> tuple[int, int]:
        return self.first, self.count


class Planning(Experiment):
    """The projections of one model that stay exact so that a scheme costs at most a given share of perplexity."""

    takes = (*CALIBRATED, "revision")
    command = "plan"
    view = "outliers.views.plan:plan_rows_section"

    name: Name = "plan"
    model: Model
    scheme: OneScheme = Field(default="absmax", validate_default=True, description="Scheme of all other projections.")
    cost: Annotated[float, Share] = Field(
        default=0.05, gt=0, le=100, allow_inf_nan=False, description="Largest increase of perplexity, such as 5%."
    )
    by: Literal["count", "parameters"] = Field(default="count", description="Size of the plan to minimize.")
    instead: Annotated[list[OneScheme], Split, Unique] = Field(
        default=[],
        description=f"Better schemes to try before a projection stays exact, such as llm.int8,w8a8; {NONE}",
    )
    blocks: Count = Field(default=BLOCKS, description="Blocks of the search, from the start of the text.")
    confirm: Count = Field(default=BLOCKS, description="Blocks after them, on which the plan is confirmed.")
    draws: Several = Field(default=DRAWS_OF_A_SET, description=DRAWS)
    export: Annotated[list[Line], Split, Unique] = Field(
        default=[],
        description="Formats of other libraries in which to write the plan too, such as compressed-tensors or torchao.",
    )

    @property
    def requested_schemes(self) -> list[Scheme | str]:
        return [self.scheme]

    def plans(self) -> list[cell.CellPlan]:
        """Return the search for a model, which is confirmed on the blocks after those that it searches with."""
        experiment = self.model_copy(update={"blocks": self.blocks + self.confirm})
        under, *better = (get_scheme(scheme, self.alpha_of_schemes) for scheme in (self.scheme, *self.instead))
        searched, confirmed = (
            ConsecutiveBlocks(experiment, 0, self.blocks),
            ConsecutiveBlocks(experiment, self.blocks, self.confirm),
        )
        search = Search(searched, confirmed, Quantized(under), tuple(better), self.cost, self.by, self.draws)
        check_search(search)
        if self.export:
            exports_of(
                self.export, Plan(model=self.model, scheme=under.name, projections=len(search.sizes)), self.revision
            )
        return [cell.CellPlan(searched, plan_stages(search), passes=lambda: passes_of(search))]


COMMAND = Command(
    "projections that have to stay exact under a scheme, so that it costs little",
    """Find projections to keep exact, or under a better scheme, so that a scheme costs little and none can be left out.

Prints these projections and the increase on other blocks, and writes the plan, plan.yaml, with rows, tables, figures
and a page to results/plan/NAME. A second run resumes the first.

Examples:

`python -m outliers.plan smollm2-135m --scheme absmax --cost 5%`

`python -m outliers.plan smollm2-135m --scheme w8a8 --cost 2% --instead llm.int8 --by parameters`
""",
    Planning,
)


@with_bar
def plan(
    model: "PreTrainedModel",
    blocks: "Iterable[torch.Tensor]",
    scheme: "str | Scheme",
    confirm: "Iterable[torch.Tensor]",
    cost: float | str = 0.05,
    by: str = "count",
    instead: "Sequence[str | Scheme]" = (),
    draws: int = DRAWS_OF_A_SET,
    calibration: "Calibration | None" = None,
    *,
    progress: bool | None = None,
) -> Plan:
    """Return a plan with few exact projections under which a scheme costs at most a given share of perplexity.

    The cost of each projection alone is measured; those that save most are left exact until the perplexity of the whole
    model is low enough; the last ones are left out again, or exchanged for others, as a trial. The set is then
    confirmed on other blocks: further projections join it until it costs little enough there too, and leave it as long
    as any of them can, so that no single one of the plan can be left out. The model is left as it was.

    Args:
        model: a causal language model, resident or streamed, with its exact weights.
        blocks: token ids, int64 (blocks, T), or a list of (T,), of the search.
        scheme: name, or a scheme of one's own, of all other projections.
        confirm: further blocks, on which the plan is confirmed.
        cost: allowed increase of perplexity, as a share: 0.05 or "5%".
        by: what to minimize: the "count" of exact projections, or their "parameters".
        instead: schemes that a projection gets before it stays exact: the first that leaves at most a tenth of the KL
            divergence that the scheme causes there.
        draws: how many times each set is measured, with embeddings changed by 1e-6 and ties of weights rounded anew.
        calibration: magnitudes of the inputs, which some remedies need; see `outliers.calibrate`.
        progress: whether to show a bar after two seconds; by default on a terminal and in a notebook.

    Returns:
        The plan; its `measured` has the cost on the confirming blocks.

    Raises:
        UserError: a scheme is unknown or quantizes no projection, `by` is unknown; as `outliers.quantize` and
            `outliers.perplexity`.

    Example:
        >>> found = outliers.plan(model, blocks[:1], "absmax", confirm=blocks[1:], cost=0.05, draws=2)
    """
    from outliers.quantization.convert import check_calibrated
    from outliers.runs.loaded import measure_loaded
    from outliers.subjects.given import Given
    from outliers.text.blocks import unpad

    if by not in BY:
        raise unknown_name("size of a plan", by, BY)
    check_calibrated(get_scheme(scheme), calibration)
    searched, confirmed = (Given(model, list(unpad(part, None))) for part in (blocks, confirm))
    under, better = Quantized(get_scheme(scheme), calibration=calibration), tuple(map(get_scheme, instead))
    cost = check_share("cost", cost)
    search = Search(searched, confirmed, under, better, cost, by, draws)
    check_search(search)
    return plan_of(measure_loaded(searched, plan_stages(search)), searched.name, cost, draws)
