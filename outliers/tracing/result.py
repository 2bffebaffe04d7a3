"""The result of a trace: statistics of bounded size that can be merged, and tables made from them."""

import json
import logging
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import reduce
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from outliers.criterion import (
    DEAD,
    LAYERS,
    POSITIONS,
    RESIDUAL,
    check_share,
    check_threshold,
    in_nnsight,
    in_transformerlens,
)
from outliers.errors import UserError, joined_names, shown
from outliers.tracing import tokens
from outliers.tracing.frame import Frame
from outliers.tracing.sketch import KEYED, quantiles, unpack_keys
from outliers.tracing.statistics import BY_POSITION, ON_STREAM, STREAM, combine, token_states, united_roles

PLACE = ["feature", "position", "token"]
NAMED = 8  # outlier features in the printed form of a trace
UNKNOWN = "unknown"  # placeholder for the text of a trace that does not name it
MOST_DEAD = 8  # number of hidden states with dead features in a message
QUARTILES = {"q1": 0.25, "median": 0.5, "q3": 0.75}
logger = logging.getLogger(__name__)


@dataclass
class Trace:
    """Statistics of the hidden states of a model over sequences; traces of parts of a text can be merged.

    alpha: magnitude from which on an entry is a hit. roles: the traced roles. block: tokens of the longest sequence
    (T). sequences: their number. heads: attention heads per layer; 0 if attention was not traced. stack: the name of
    the stack of layers, if the model has several; first_layer: the number of its first layer among all. labels: the
    source of the trace, free to use. architecture: the model type in its configuration. modules: by role, the paths of
    the modules that read it in each layer, and by "residual", the path of the layer; empty in traces of earlier
    versions. experts: number of experts of a layer (E), in a mixture. widths: for roles whose layers differ in their
    number of features, this number for each layer, 0 without the role; the statistics of features that a layer lacks
    are zeros. names: by token id that occurred, its text and its type, see `outliers.text.tokens.named_tokens`; empty
    unless tokens were traced.

    statistics, by name (L layers, h features of the role, V token ids; "+" joins roles that are counted together):

    | name | shape and dtype | meaning |
    |---|---|---|
    | ROLE.min, ROLE.max | (L, h) float32 | extremes |
    | ROLE.largest | (L, 5) float64 | absolute value, value, feature, position, token id of the largest entry |
    | ROLE.rest.max | (L,) float32 | largest absolute value without position 0 |
    | ROLE.hits, ROLE.sequences_hit | (L, h) int64 | entries, and sequences with an entry, of at least alpha |
    | ROLE.sum, ROLE.squares, ROLE.squares_rest | (L, h) float64 | power sums; rest: without position 0 |
    | ROLE.kurtosis_tensor, ROLE.kurtosis_token | (L, 2) float64 | sums over sequences, tokens; without position 0 |
    | ROLE.magnitude | (T, h) float64 | of `ON_STREAM`: largest absolute value in the layers, summed over sequences |
    | ROLE+ROLE.layers_hit, .positions_hit | (h,) int64 | for roles together, summed over sequences |
    | residual.largest | (L, 5) float64 | as ROLE.largest |
    | residual.sum_of_max, .sum_of_ratios | (L,) float64 | of the largest magnitude, and its ratio to the median |
    | residual.massive | (L, h) int64 | massive activations |
    | residual.massive_positions, .massive_tokens | (T,), (V,) int64 | massive activations by position and token |
    | attention.sinks | (L, T) int64 | heads for which a position is a sink |
    | attention.sinks_tokens | (V,) int64 | the same by token |
    | text.sequences | (T,) int64 | sequences that reach a position |
    | experts.tokens | (L, E) int64 | tokens that each expert got; 0 in layers without experts |
    | experts.max, .hits, .squares | (L, E, units) float32, int64, float32 | as ROLE's, of the last projection's input |
    | experts.state_squares | (L, E, features) float32 | squares of the states that an expert reads |
    | experts.largest | (L · E, 5) float64 | as ROLE.largest, of what an expert adds to the residual stream |

    and, if tokens were traced, statistics of the n token ids that occurred, where position 0 counts as a token of its
    own, V; for the states S "attn_in+ffn_in", as far as they were traced, and "residual"; the magnitude is the largest
    over the layers:

    | name | shape and dtype | meaning |
    |---|---|---|
    | tokens.ids, tokens.positions | (n,) int64 | ids in ascending order; positions that they are at |
    | S.token_sum, S.token_max | (n, h) float64, float32 | magnitudes by token |
    | S.strongest, S.weakest | (h, 8) float32 | magnitudes where they are most and least; -1 where there are fewer |
    | S.strongest_at, S.weakest_at | (h, 8, 14) int64 | position; token ids from 8 before to 4 after it, V for none |

    The features of attn_in and ffn_in are those of the residual stream, of attn_out the concatenated heads, of ffn_out
    the feed-forward units: only those of the residual stream correspond between layers.

    sketch: counts of hit values by (layer, role, feature, bucket), packed into one integer; for the roles of
    `SKETCHED`.

    Example:
        >>> traced = outliers.trace(model, blocks)
        >>> features = traced.outlier_features(), traced.largest_values(), traced.massive_activations()
    """

    alpha: float
    roles: tuple[str, ...]
    block: int
    sequences: int
    heads: int
    statistics: dict[str, torch.Tensor]
    sketch: Counter
    stack: str = ""
    first_layer: int = 0
    labels: dict = field(default_factory=dict)
    names: dict[int, tuple[str, str]] = field(default_factory=dict)
    architecture: str = ""
    modules: dict[str, list[list[str]]] = field(default_factory=dict)
    experts: int = 0
    widths: dict[str, list[int]] = field(default_factory=dict)

    @property
    def layers(self) -> int:
        """Number of traced layers."""
        return len(self.statistics["residual.largest"])

    @property
    def cross(self) -> bool:
        """Whether the trace is of the encoder's output as a decoder reads it."""
        return self.stack == "cross"

    @property
    def positions(self) -> int:
        """Number of positions of all sequences together."""
        return int(self.statistics["text.sequences"].sum())

    def __repr__(self) -> str:
        """Summarize the source, the outlier features and the largest value, in up to five lines."""
        widths = {role: self.statistics[f"{role}.min"].shape[1] for role in self.roles}
        model = f" of {self.labels['model']}" if "model" in self.labels else ""
        roles = ", ".join(f"{role} {width:,}" for role, width in widths.items())
        lengths = "" if self.positions == self.sequences * self.block else "up to "
        lines = [
            f"Trace{model}: {self.sequences:,} sequences × {lengths}{self.block:,} tokens, alpha {self.alpha:g}",
            f"{self.layers} {f'{self.stack} ' * bool(self.stack)}layers × features: {roles}",
        ]
        if set(ON_STREAM) & set(self.roles):
            outliers, width = self.outlier_features()["feature"], self.statistics["residual.massive"].shape[1]
            few = joined_names(outliers, NAMED)
            lines.append(f"outlier features: {len(outliers):,} of {width:,}{f' ({few})' if few else ''}")
        largest = self.largest_values().sort_values("max", ascending=False, kind="stable").iloc[0]
        token = largest.get("token_text", f"id {largest['token']}")
        where = "{role} of layer {layer}, feature {feature}, position {position}".format(**largest)
        lines.append(f"largest value {largest['value']:,.1f}: {where}, token {token}")
        extras = [name for name, exists in (("attention sinks", self.heads), ("tokens", self.names)) if exists]
        return "\n  ".join([*lines, *([f"with {' and '.join(extras)}"] if extras else [])])

    def merge(self, other: "Trace") -> "Trace":
        """Return the trace of both texts: counts, extremes and sketches are exact, float64 sums up to rounding.

        Entries of `labels` that only one of them has are kept.

        Raises:
            UserError: the traces are of different roles or alphas, or of models of different shapes; only one has
                tokens, or their names differ; or their sources differ, such as the model, its weights or the text.
        """
        for what in ("alpha", "roles", "heads", "stack"):
            mine, theirs = getattr(self, what), getattr(other, what)
            if mine != theirs:
                raise UserError(f"cannot merge traces whose {what} are {mine} and {theirs}; trace both alike")
        if bool(self.names) != bool(other.names):
            raise UserError("cannot merge a trace with tokens and one without; trace both alike")
        if self._shapes() != other._shapes():
            raise UserError("cannot merge traces of models of different shapes; expected traces of one model")
        if any(self.names[token] != other.names[token] for token in self.names.keys() & other.names.keys()):
            raise UserError("cannot merge traces whose tokens have different names; trace both with one tokenizer")
        for what in self.labels.keys() & other.labels.keys():
            mine, theirs = self.labels[what], other.labels[what]
            if mine != theirs:
                raise UserError(
                    f"cannot merge traces whose {what} are {shown(mine)} and {shown(theirs)}; expected the same of both"
                )
        merged = {name: combine(name, self.statistics[name], other.statistics[name]) for name in self._shapes()}
        if self.names:
            merged |= tokens.merge_token_statistics(self.statistics, other.statistics)
        sizes = {"block": max(self.block, other.block), "sequences": self.sequences + other.sequences}
        both = {"statistics": merged, "sketch": self.sketch + other.sketch, "labels": self.labels | other.labels}
        return replace(self, **sizes, **both, names=self.names | other.names)

    def _shapes(self) -> dict[str, tuple]:
        """Return the shapes of statistics that are not by token, without dimensions that depend on the text."""
        kinds = {name: name.rpartition(".")[2] for name in self.statistics}
        shapes = {name: list(self.statistics[name].shape) for name in kinds if kinds[name] not in tokens.STATISTICS}
        for name in shapes:
            if kinds[name] in BY_POSITION:
                del shapes[name][BY_POSITION[kinds[name]]]
        return shapes

    def save(self, stem: str | Path) -> None:
        """Write `stem`.safetensors.

        Raises:
            UserError: the file cannot be written.
        """
        from outliers.tracing import store  # late, because it imports pyarrow and pydantic; so in `load`

        store.write_trace(Path(f"{stem}.safetensors"), json.dumps(self._header()), self.statistics, self.sketch)

    def _header(self) -> dict:
        from outliers.tracing import store

        absent = {name for name in ("experts", "widths") if not getattr(self, name)}
        absent |= set() if self.stack else {"stack", "first_layer"}
        return {name: getattr(self, name) for name in store.TraceHeader.model_fields if name not in absent}

    @classmethod
    def load(cls, stem: str | Path) -> "Trace":
        """Read a trace that `save` wrote, or an earlier version with the sketch in `stem`.parquet.

        Raises:
            UserError: the file is missing, damaged, or of a version with fewer statistics.
        """
        from outliers.tracing import store

        header, statistics, sketch = store.read_trace(Path(f"{stem}.safetensors"))
        return cls(**dict(header), statistics=statistics, sketch=sketch)

    def save_imatrix(self, path: str | Path, floor: float = DEAD) -> None:
        """Write an importance matrix for `llama-quantize --imatrix`.

        It has the sums of squares of each projection's inputs, by the name of its weight in GGUF files
        (docs/names.md#importance-matrices), for each expert over the tokens that it got. Features that never fire are
        logged.

        Args:
            path: of the file.
            floor: the least mean square of a feature; 0 for none. llama.cpp makes NaN or zeros of a block of weights
                whose inputs are all 0.

        Raises:
            UserError: llama.cpp does not know the architecture, none of the projections was traced, the trace is of an
                earlier version, the floor is negative, or the file cannot be written.
        """
        from outliers.tracing.imatrix import InputSums, expert_sums, sums_by_weight, write_imatrix  # which imports gguf

        path, least = Path(path), check_threshold("floor", floor, DEAD) if floor else 0

        def sums(squares: torch.Tensor, tokens: torch.Tensor) -> InputSums:
            return InputSums(squares.numpy().clip(least * tokens.numpy()[:, None]), tokens.numpy())

        every = torch.tensor([self.positions])
        by_module = [
            (module, sums(squares[None, features_of_layer], every))
            for role, of_layers in self.modules.items()
            if role != RESIDUAL
            for modules, squares, features_of_layer in zip(
                of_layers, self.statistics[f"{role}.squares"], self._has_feature(role), strict=True
            )
            for module in modules
        ]
        by_name = sums_by_weight(self.architecture, by_module)
        if self.experts:
            names = ("tokens", "state_squares", "squares")
            for layer, tokens, states, units in zip(
                self._layer_numbers, *(self.statistics[f"experts.{name}"] for name in names), strict=True
            ):
                if tokens.any():
                    by_name |= expert_sums(self.architecture, layer, sums(states, tokens), sums(units, tokens))
        write_imatrix(path, by_name, str(self.labels.get("text", UNKNOWN)), self.sequences, self.block)
        dead = self.dead_features().groupby(["role", "layer"], sort=False)["feature"].agg(list)
        if len(dead):
            width = sum(squares.numel() for name, squares in self.statistics.items() if name.endswith(".squares"))
            where = [f"{role} of layer {layer}: {joined_names(features)}" for (role, layer), features in dead.items()]
            logger.warning(
                f"{dead.str.len().sum():,} of {width:,} inputs of projections never fire on this text; their importance"
                f" in '{path.name}' is {floor:g} ({'; '.join(where[:MOST_DEAD])}{'; …' * (len(where) > MOST_DEAD)}); a "
                "longer text may reach them"
            )
        if self.experts:
            received = self.statistics["experts.tokens"]
            if unused := int((received[received.any(1)] == 0).sum()):
                logger.warning(
                    f"{unused} of {received.any(1).sum() * self.experts:,} experts got no token of this text; in "
                    f"'{path.name}' they have counts of 0, for which llama.cpp weighs all features alike"
                )

    def dead_features(self) -> Frame:
        """Return one row per `layer`, `role` and `feature` that never fires: its mean square over the text is below
        1e-12."""
        rows = []
        for role in self.roles:
            dead = (self.statistics[f"{role}.squares"] < DEAD * self.positions) & self._has_feature(role)
            table = pd.DataFrame(dead.nonzero().numpy(), columns=["layer", "feature"]).assign(role=role)
            rows.append(table.assign(layer=table["layer"] + self.first_layer))
        return Frame(pd.concat(rows, ignore_index=True)[["layer", "role", "feature"]])

    def expert_shares(self) -> Frame:
        """Return one row per `layer` and `expert` of a mixture.

        Returns:
            `share`, the fraction of all tokens that the router sends to the expert; the shares of a layer sum to the
            number of experts per token. For the input of its last projection: the largest absolute value, `max`, with
            its `unit`; and `outlier_units`, how many units are at least alpha at 6 % of its tokens or more. For its
            output to the residual stream: the largest `value`, with its `feature`, `position` and `token` id, with its
            `token_text` if the trace has tokens.

        Raises:
            UserError: the model has no experts, or the trace is of an earlier version.
        """
        if not self.experts:
            raise UserError("this trace has no experts; expected that of a mixture of experts, by this version")
        received, units, hits, largest = (
            self.statistics[f"experts.{name}"] for name in ("tokens", "max", "hits", "largest")
        )
        index = pd.MultiIndex.from_product([self._layer_numbers, range(self.experts)], names=["layer", "expert"])
        most = units.flatten(0, 1).max(1)
        frequent = (hits >= POSITIONS * received[..., None]) & (hits > 0)
        columns = {
            "share": received.flatten() / self.positions,
            "max": most.values,
            "unit": most.indices,
            "outlier_units": frequent.sum(2).flatten(),
            **dict(zip(("value", *PLACE), largest[:, 1:].T, strict=True)),
        }
        table = pd.DataFrame({name: column.numpy() for name, column in columns.items()}, index).reset_index()
        table = table.astype(dict.fromkeys(PLACE, "int64"))
        has_experts = received.any(1).repeat_interleave(self.experts).numpy()
        return self._with_names(table[has_experts].reset_index(drop=True))

    def hooks(self) -> Frame:
        """Return the names of hidden states in other tools, one row per layer and role, and per layer's residual
        stream.

        Returns:
            `layer` and `role`, by which the table can be merged with others; `transformerlens`, the name in
            TransformerLens, for a model with one stack of layers; `nnsight`, the path in nnsight, unless the trace is
            of an earlier version (docs/names.md).
        """
        roles = [*self.roles, *([] if self.cross else [RESIDUAL])]
        rows = [(layer, role) for role in roles for layer in self._layer_numbers]
        table = pd.DataFrame(rows, columns=["layer", "role"])
        table["transformerlens"] = [None if self.stack else in_transformerlens(*row) for row in rows]
        first = {
            role: [in_nnsight(role, paths[0]) if paths else None for paths in by_layer]
            for role, by_layer in self.modules.items()
        }
        return Frame(table.assign(nnsight=[name for role in roles for name in first.get(role, [None] * self.layers)]))

    def features(self, roles: Iterable[str] = STREAM, by: str | None = None) -> Frame:
        """Return statistics of every feature, the most affected first (docs/definitions.md#outlier-features).

        Args:
            roles: the roles whose hits are united: ("attn_in", "ffn_in"), which share the residual stream's features,
                or one role.
            by: None for one row per feature; "role" for one per role and feature; "layer" for one per layer, role and
                feature.

        Returns:
            `layers`, the fraction of layers with a hit in a sequence (by layer: 1 or 0), and `positions`, the fraction
            of positions with a hit in a sequence, both averaged over sequences; `positions_mean`, the fraction of all
            pairs of hidden state and position with a hit; `hits`, their number; `one_sided`, whether all hits have one
            sign; `q1`, `median`, `q3` of the hit values, within 1 %, empty without hits and for ffn_out; `max`, the
            largest absolute value.

        Raises:
            UserError: the roles were not traced, or not together.
        """
        united = self._united(roles)
        if by is None:
            table = self._features_of(united)
        elif by == "role":
            table = pd.concat([self._features_of((role,)).assign(role=role) for role in united])
        elif by == "layer":
            table = pd.concat([self._features_in_layers(role) for role in united])
        else:
            raise UserError(f"features by '{by}'; expected by None, 'role' or 'layer'")
        places = [column for column in ("feature", "layer", "role") if column in table]
        rest = [column for column in table if column not in places]
        return Frame(table[places + rest].sort_values(["positions", "max"], ascending=False, ignore_index=True))

    def outlier_features(
        self, layers: float = LAYERS, positions: float = POSITIONS, roles: Iterable[str] = STREAM, by: str | None = None
    ) -> Frame:
        """Return the features that reach both fractions (LLM.int8(), section 4.1), in the columns of `features`.

        Whether a feature is an outlier is decided over all layers and the given roles together, also if the table is
        `by` role or layer.

        Raises:
            UserError: a fraction is above 1, such as 25 for 25 %.
        """
        layers, positions = check_share("layers", layers, whole=True), check_share("positions", positions, whole=True)
        united = self.features(roles)
        outliers = united[(united["layers"] >= layers) & (united["positions"] >= positions)]
        if by is None:
            return Frame(outliers.reset_index(drop=True))
        table = self.features(roles, by)
        return Frame(table[table["feature"].isin(outliers["feature"])].reset_index(drop=True))

    def _united(self, roles: Iterable[str]) -> tuple[str, ...]:
        given = {roles} if isinstance(roles, str) else set(roles)
        united = tuple(role for role in self.roles if role in given)
        default = given == set(STREAM)  # a trace may lack one of these
        if default and self.cross:
            united = self.roles
        if united not in united_roles(self.roles) or not (default or given <= set(self.roles)):
            known = ", ".join("+".join(united) for united in united_roles(self.roles))
            raise UserError(f"no statistics of the roles {', '.join(sorted(given))} together; this trace has {known}")
        return united

    def _features_of(self, united: tuple[str, ...]) -> pd.DataFrame:
        having = [self.layers_with(role) for role in united]
        layers = set().union(*having)
        joined, hits = "+".join(united), sum(self.statistics[f"{role}.hits"].sum(0) for role in united)
        columns = {
            "layers": self.statistics[f"{joined}.layers_hit"].double() / (len(layers) * self.sequences),
            "positions": self.statistics[f"{joined}.positions_hit"].double() / self.positions,
            "positions_mean": hits.double() / (sum(map(len, having)) * self.positions),
            "hits": hits,
        }
        low = torch.stack([self.statistics[f"{role}.min"].amin(0) for role in united]).amin(0)
        high = torch.stack([self.statistics[f"{role}.max"].amax(0) for role in united]).amax(0)
        columns |= {"one_sided": self._one_sided(low, high)}
        table = pd.DataFrame({name: value.numpy() for name, value in columns.items()}).rename_axis("feature")
        largest = torch.maximum(-low, high)
        return self._with_quartiles(table, united).assign(max=largest.numpy()).reset_index()

    def _features_in_layers(self, role: str) -> pd.DataFrame:
        hits = self.statistics[f"{role}.hits"]
        positions = hits.double() / self.positions
        columns = {
            "layers": self.statistics[f"{role}.sequences_hit"].double() / self.sequences,
            "positions": positions,
            "positions_mean": positions,
            "hits": hits,
            "one_sided": self._one_sided(self.statistics[f"{role}.min"], self.statistics[f"{role}.max"]),
        }
        index = pd.MultiIndex.from_product([range(size) for size in hits.shape], names=["layer", "feature"])
        table = pd.DataFrame({name: value.flatten().numpy() for name, value in columns.items()}, index)
        table = self._with_quartiles(table, (role,))
        table = table.assign(max=self.largest(role).flatten().numpy(), role=role).reset_index()
        table = table[self._has_feature(role).flatten().numpy()]
        return table.assign(layer=table["layer"] + self.first_layer)

    def layers_with(self, role: str) -> list[int]:
        """Return the numbers of the layers that have a role; the statistics of others are zeros."""
        by_layer = self.modules.get(role) or [[role]] * self.layers  # in traces of earlier versions all layers have it
        return [layer for layer, modules in zip(self._layer_numbers, by_layer, strict=True) if modules]

    def _has_feature(self, role: str) -> torch.Tensor:
        """Return which features of a role each layer has, bool (L, h)."""
        width, having = self.statistics[f"{role}.min"].shape[1], self.layers_with(role)
        widths = self.widths.get(role) or [width * (layer in having) for layer in self._layer_numbers]
        return torch.arange(width) < torch.tensor(widths)[:, None]

    @property
    def _layer_numbers(self) -> range:
        """The numbers of the traced layers among those of all stacks."""
        return range(self.first_layer, self.first_layer + self.layers)

    def _one_sided(self, low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        return (high >= self.alpha) ^ (low <= -self.alpha)

    def _with_quartiles(self, table: pd.DataFrame, united: tuple[str, ...]) -> pd.DataFrame:
        """Add the quartiles of the hit values of united roles to a table whose index names their groups."""
        keys, counts = np.array(sorted(self.sketch.items()), np.int64).reshape(-1, 2).T
        values = pd.DataFrame({**unpack_keys(keys), "count": counts})
        values = values[values["role"].isin([KEYED.index(role) for role in united if role in KEYED])]
        quartiles = quantiles(values, list(table.index.names), QUARTILES)
        # a bucket's estimate may be up to 1 % below alpha, but a hit is not
        return table.join(np.sign(quartiles) * quartiles.abs().clip(lower=self.alpha))

    def largest(self, role: str) -> torch.Tensor:
        """Return the largest absolute value of each feature, (L, h)."""
        return torch.maximum(-self.statistics[f"{role}.min"], self.statistics[f"{role}.max"])

    def hidden_states(self) -> Frame:
        """Return the infinity norm and three kurtoses, one row per layer and role; `_rest` columns exclude position
        0."""
        rows, length = [], self.positions / self.sequences  # on average
        for role in self.roles:
            table = {"layer": self._layer_numbers, "role": role, "infinity_norm": self.largest(role).amax(1).numpy()}
            table["infinity_norm_rest"] = self.statistics[f"{role}.rest.max"].numpy()
            for kind, count in (("tensor", (1, 1)), ("token", (length, length - 1))):
                means = self.statistics[f"{role}.kurtosis_{kind}"] / self.sequences
                for column, rest in enumerate(("", "_rest")):
                    table[f"kurtosis_{kind}{rest}"] = means[:, column].numpy() / count[column]
            correction = 1 / self._has_feature(role).double().mean(1)  # corrects means for features that a layer lacks
            for rest in ("", "_rest"):
                squares = self.statistics[f"{role}.squares{rest}"]
                means = squares.mean(1) * correction, squares.square().mean(1) * correction
                table[f"kurtosis_feature{rest}"] = (means[1] / means[0] ** 2).numpy()
            table = pd.DataFrame(table)
            rows.append(table[table["layer"].isin(self.layers_with(role))])
        return Frame(pd.concat(rows, ignore_index=True))

    def largest_values(self, by: str | None = None) -> Frame:
        """Return the largest |x| of each role, which sets the scale of a tensor that is quantized as a whole.

        Args:
            by: None for one row per role; "layer" for one per layer and role.

        Returns:
            `role`, `layer`; `max`, the largest absolute value, and `value`, the same entry with its sign; its `feature`
            (on the role's own axis), its `position` in the sequence, and the `token` id there, with its `token_text` if
            the trace has tokens.

        Raises:
            UserError: `by` is something else.
        """
        if by not in (None, "layer"):
            raise UserError(f"largest values by '{by}'; expected by None or 'layer'")
        tables = [self._largest_entries(role).assign(role=role) for role in self.roles]
        table = pd.concat(tables, ignore_index=True)
        if by is None:
            table = table.loc[table.groupby("role", sort=False)["max"].idxmax()]
        return self._with_names(table[["role", "layer", "max", "value", *PLACE]].reset_index(drop=True))

    def _largest_entries(self, state: str) -> pd.DataFrame:
        table = pd.DataFrame(self.statistics[f"{state}.largest"].numpy(), columns=["max", "value", *PLACE])
        table = table.astype(dict.fromkeys(PLACE, "int64")).assign(layer=self._layer_numbers)
        return table[table["layer"].isin(self.layers_with(state))]

    def massive_activations(self) -> Frame:
        """Return the massive activations of the residual stream, one row per layer
        (docs/definitions.md#massive-activations).

        Returns:
            `massive`, the number of massive activations in a sequence; `max` and `ratio`, max |x| and max |x| / median
            |x| of a sequence, all averaged over sequences; the largest `value` of all, with its `feature`, `position`
            and `token` id, with its `token_text` if the trace has tokens.
        """
        massive, *sums = (self.statistics[f"residual.{name}"] for name in ("massive", "sum_of_max", "sum_of_ratios"))
        means = zip(("massive", "max", "ratio"), (massive.sum(1), *sums), strict=True)
        means = {name: (value.double() / self.sequences).numpy() for name, value in means}
        largest = self._largest_entries("residual")[["value", *PLACE]]
        return self._with_names(pd.DataFrame({"layer": self._layer_numbers, **means}).join(largest))

    def attention_sinks(self) -> pd.DataFrame:
        """Return attention sinks by position.

        `share` is the fraction of (layer, head) pairs for which the position is a sink, averaged over the sequences
        that reach it.

        Raises:
            UserError: attention was not traced.
        """
        reached = self.statistics["text.sequences"]
        share = self._sink_counts("sinks").sum(0).double() / (self.layers * self.heads * reached)
        return pd.DataFrame({"position": range(self.block), "share": share.numpy()})

    def sink_tokens(self) -> Frame:
        """Return the token ids at sinks, the most common first; `share` is their fraction of all (layer, head, sink)
        triples."""
        counts = pd.Series(self._sink_counts("sinks_tokens").numpy()).sort_values(ascending=False, kind="stable")
        counts = counts[counts > 0]
        return self._with_names(pd.DataFrame({"token": counts.index, "share": (counts / counts.sum()).to_numpy()}))

    def _with_names(self, table: pd.DataFrame) -> Frame:
        if self.names:
            texts = [tokens.token_name(token, self.names) for token in table["token"]]
            table.insert(table.columns.get_loc("token") + 1, "token_text", texts)
        return Frame(table)

    def tokens(self, feature: int, by: str = "token", role: str | None = None) -> Frame:
        """Return the tokens at which a feature of the residual stream is large, or where it is strongest and weakest.

        The magnitude of the feature at a position is the largest |x| over the layers
        (docs/definitions.md#tokens-of-a-feature). Position 0 is kept separate from the others.

        Args:
            feature: the number of the feature.
            by: "token" for one row per token, the largest mean first, and one for position 0 with any token (`token`
                -1); "type" for one row per type of tokens: "first" (position 0), "delimiter", "word start" or "inside a
                word"; "position" for the positions after position 0 where it is strongest and weakest.
            role: "attn_in+ffn_in", the default, for the inputs of the attention and feed-forward layers; "residual" for
                the outputs of the decoder layers, where massive activations are.

        Returns:
            By token and type: `share` of all positions, `mean` and `max` magnitude. By position: its `extreme`,
                "strongest" or "weakest", its `magnitude`, and its `context`, with the token between « and ».

        Raises:
            UserError: the trace has no tokens, or not of this role; there is no such feature; `by` is something else.
        """
        states = token_states(self.roles)
        return Frame(tokens.table_of(self.statistics, states, self.names, feature, by, role or states[0]))

    def _sink_counts(self, name: str) -> torch.Tensor:
        """Return a statistic of attention sinks, "attention.NAME"; raise UserError if the trace is without
        attention."""
        if not self.heads:
            raise UserError("attention sinks were not looked for; trace with attention=True")
        return self.statistics[f"attention.{name}"]


def merge_traces(parts: Iterable[list[Trace]]) -> list[Trace]:
    """Merge the traces of parts of a text, separately for each view of the model."""
    return [reduce(Trace.merge, traces) for traces in zip(*parts, strict=True)]
