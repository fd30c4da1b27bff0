"""What every measure takes (`MeasureContext`), and its numbers as rows for the store (`Measurements`), named as in
`sparsedepth.quantities`; a missing value is None.

Sequences to score a model on (`Scored`) are inputs, and targets with unscored positions marked:

    loss = sum of -log p(target) over the scored positions / their number

A sequence's loss is its sum / the mean number of scored positions per sequence, so that its mean over sequences is the
loss above. Ratios of losses need nothing else. The interval of a mean over positions is that of a ratio of two means
over sequences (`per_position`), since resampling changes the number of positions.

Depth profile of a score: how its value is distributed over the blocks.

A score is the mean of rows, each of one block (replaced or skipped) or two (a swapped pair). The weight of each block:

    w = argmin sum over rows (value - sum of w_k over the row's blocks k)^2,   w >= 0

With one block per row it is the block's mean (at least 0); with pairs, what the block adds to each of its pairs. Then

    without first block = mean of the rows without block 1         deep half = mean of the rows of blocks above L / 2
    largest share = max w / sum w                                  centre = sum w_k (k - 1) / (L - 1) / sum w,   0 to 1

The centre is the score's centre of mass in depth. With equal blocks the share is 1/L and the centre 1/2; for the causal
score, in which the last block has no row, 1/(L - 1) and (L - 2) / (2 L - 2).

Shapes: S = T + 1 tokens with the last target, H heads."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from scipy.optimize import nnls
from torch import Tensor

from sparsedepth.config.run import MeasureOnlyConfig, RunConfig
from sparsedepth.config.task import IGNORED
from sparsedepth.data.sequences import ReadHeldOut
from sparsedepth.measure.bootstrap import BootstrapEstimate, ByPair, finite, ratio
from sparsedepth.probe.fork import rows_per_pass
from sparsedepth.probe.probed_model import ProbedModel
from sparsedepth.quantities import ALL, PROFILED
from sparsedepth.quantities.quantity import Named, Quantity, Row, Table, Tables

Summary = dict[str, float | int | None]


@dataclass(frozen=True, eq=False)
class Scored:
    inputs: Tensor
    """inputs_NT"""
    targets: Tensor
    """targets_NT; IGNORED where not scored"""
    difficulty: Tensor | None = None
    """difficulty_NT at a task's scored positions"""

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def n_scored(self) -> int:
        return int((self.targets != IGNORED).sum())

    @cached_property
    def scale(self) -> float:
        """Tokens / scored positions, 1 in text: a mean over all tokens (0 where unscored) times
        this is the mean over scored positions. Raises ValueError if there is none."""
        if not self.n_scored:
            raise ValueError(f"none of the {self.targets.numel():,} targets is scored: all are {IGNORED}")
        return self.targets.numel() / self.n_scored

    @property
    def weight(self) -> np.ndarray:
        """weight_N: a sequence's scored positions / their mean over sequences; 1 in text."""
        scored_N = (self.targets != IGNORED).sum(1).double()
        return (scored_N / self.targets.shape[1] * self.scale).cpu().numpy()

    def parts(self, probed: ProbedModel, memory: int = 1) -> Iterator["Scored"]:
        """Parts on the model's device, split as `probe.fork.batches` splits tokens with their last target."""
        rows = rows_per_pass(probed, self.inputs.shape[1] + 1, memory)
        for inputs_BT, targets_BT in zip(self.inputs.split(rows), self.targets.split(rows), strict=True):
            yield Scored(inputs_BT.to(probed.device), targets_BT.to(probed.device))


def per_position(value_R: np.ndarray, weight_R: np.ndarray) -> np.ndarray:
    """The statistic of a mean over scored positions: from means over sequences [R, ...] of values, scaled as above, and
    of the sequences' weights."""
    return ratio(value_R.T, weight_R).T


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasureContext:
    probed: ProbedModel
    config: RunConfig | MeasureOnlyConfig
    held_out: ReadHeldOut
    bytes_per_token: float | None
    eod: int | None
    """the token that ends a document; None = unknown"""

    def sequences(self, seq_len: int, n_tokens: int, skip_tokens: int = 0) -> Scored:
        found = self.held_out(seq_len, n_tokens, skip_tokens)
        with torch.inference_mode(False):  # they are kept, also for measures that compute gradients
            difficulty = None if found.difficulty is None else torch.from_numpy(found.difficulty)
            return Scored(torch.from_numpy(found.inputs), torch.from_numpy(found.targets), difficulty)

    @cached_property
    def scored(self) -> Scored:
        return self.sequences(self.config.seq_len, self.config.measure_tokens)

    @property
    def inputs(self) -> Tensor:
        return self.scored.inputs

    @property
    def n_tokens(self) -> int:
        """Scored or not."""
        return self.scored.targets.numel()

    @property
    def fit(self) -> Tensor:
        """fit_NT, on all of whose tokens maps are fitted, scored or not."""
        return self.sequences(self.config.seq_len, self.config.fit_tokens, self.config.measure_tokens).inputs

    def rng(self) -> np.random.Generator:
        """Always the same: draws depend neither on the run nor on which other measures run."""
        return np.random.default_rng(0)


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Rows for the store; n is the sample size of a value."""

    step: int
    """training steps of the model"""
    summary: Summary = field(default_factory=dict)
    """columns of `runs`"""
    layers: list[Named] = field(default_factory=list)
    """step, layer, metric, value, n (tokens, matrix entries or attention weights)"""
    heads: list[Named] = field(default_factory=list)
    """step, layer, head (from 1), metric, value, n (attention weights)"""
    pairs: list[Named] = field(default_factory=list)
    """step, layer, other_layer, metric, value, n (tokens)"""
    tokens: list[Named] = field(default_factory=list)
    """a sample of tokens: step, sequence, position and the other columns of quantities.TOKENS"""
    difficulty: list[Named] = field(default_factory=list)
    """of a task: step, difficulty, positions, loss, accuracy"""

    def add_score(self, name: str, estimate: BootstrapEstimate) -> None:
        self.summary.update({name: estimate.value, f"{name}_lo": estimate.lo, f"{name}_hi": estimate.hi})

    def _row(self, metric: str, value: float | None, n: int, **place: int) -> Named:
        return {"step": self.step, **place, "metric": metric, "value": value, "n": n}

    def add_layers(self, metric: str, values: Sequence[float | None], n: int | Sequence[int], first: int = 1) -> None:
        """One value per layer from `first` on; `n` is the sample size of each, or of all."""
        sizes = [n] * len(values) if isinstance(n, int) else n
        for layer, (value, size) in enumerate(zip(values, sizes, strict=True), start=first):
            self.layers.append(self._row(metric, value, size, layer=layer))

    def add_profile(
        self,
        name: str,
        by_layer: Sequence[float | None],
        score: BootstrapEstimate,
        n: int,
        *,
        first: int = 1,
        called: str = "",
    ) -> None:
        """Values by layer from `first` on (0 for states, 1 for updates), and their score, which may have another
        name."""
        self.add_score(called or name, score)
        self.add_layers(name, by_layer, n, first)

    def add_layer_scores(self, metric: str, estimates: Sequence[BootstrapEstimate], n: int) -> None:
        """One value per layer from 1 on, with its interval."""
        for end in ("value", "lo", "hi"):
            name = metric if end == "value" else f"{metric}_{end}"
            self.add_layers(name, [getattr(estimate, end) for estimate in estimates], n)

    def add_depth_columns(self, measure: str, n_layers: int) -> None:
        """The columns of the depth profiles of this measure's scores, from their rows."""
        for score in PROFILED:
            if score.measure == measure and score.name in self.summary:
                profile = depth_profile(entries_of(score, self.layers, self.pairs), n_layers)
                self.summary.update({f"{score.name}_{name}": value for name, value in profile.items()})

    def add_heads(self, metric: str, by_head: Iterable[Iterable[float]], n: int) -> None:
        """One value per layer and head of an array [L, H]."""
        for layer, values in enumerate(by_head, start=1):
            for head, value in enumerate(values, start=1):
                self.heads.append(self._row(metric, finite(value), n, layer=layer, head=head))

    def add_pairs(self, metric: str, values: ByPair, n: int) -> None:
        for (layer, other), value in values.items():
            self.pairs.append(self._row(metric, value, n, layer=layer, other_layer=other))

    def tables(self) -> dict[Table, list[Named]]:
        tables: Tables = ("layers", "heads", "pairs", "tokens", "difficulty")
        return {table: getattr(self, table) for table in tables}

    def check_records(self, measure: str) -> None:
        """Asserts that every column and metric of a measure has a record in `sparsedepth.quantities`."""
        produced: set[tuple[str, str]] = {("runs", name) for name in self.summary}
        for view, rows in self.tables().items():
            for row in rows:  # a metric of the long tables carries its threshold: weight_sparsity@0.001
                names = [row["metric"].partition("@")[0]] if "metric" in row else row
                produced |= {(view, name) for name in names}
        unknown = produced - {(column.view, column.name) for column in ALL if column.measure == measure}
        assert not unknown, f"measure {measure!r} produces {sorted(unknown)}, which has no record in quantities"

    def check_values(self, n_layers: int) -> None:
        """Raises ValueError for a value that is no number (a tensor, a text), and for a layer that is none."""
        rows = [*self.layers, *self.heads, *self.pairs]
        for row in rows:
            layers = [row["layer"], row.get("other_layer", 0)]
            if not all(isinstance(layer, int) and 0 <= layer <= n_layers for layer in layers):
                raise ValueError(f"{row['metric']} is of layer {layers[0]!r}; layers are 0 to {n_layers}")
        for name, value in [*self.summary.items(), *((row["metric"], row["value"]) for row in rows)]:
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
                raise ValueError(f"{name} is a {type(value).__name__}; give a number, such as float(value)")

    def extend(self, other: "Measurements") -> None:
        self.summary.update(other.summary)
        for table, rows in self.tables().items():
            rows.extend(other.tables()[table])


Entry = tuple[tuple[int, ...], float | None]
"""A row's blocks, from 1, and its value."""


def depth_profile(entries: Sequence[Entry], n_layers: int) -> dict[str, float | None]:
    """The depth profile of one score, from its rows; None where undefined: no such row, a row without a value, or no
    weight above 0."""
    values = np.array([np.nan if value is None else value for _, value in entries], dtype=float)
    known = len(values) > 0 and bool(np.isfinite(values).all())
    first = np.array([min(blocks) for blocks, _ in entries])

    def mean_from(least: float) -> float | None:
        return float(values[first >= least].mean()) if known and (first >= least).any() else None

    weight_L = block_weights(entries, n_layers) if known else np.zeros(n_layers)
    total = weight_L.sum()
    share_L = weight_L / total if total > 0 else None
    depth_L = np.arange(n_layers) / max(n_layers - 1, 1)
    return {
        "without_first": mean_from(2),
        "deep_half": mean_from(n_layers / 2 + 1 / 2),
        "largest_share": None if share_L is None else float(share_L.max()),
        "centre": None if share_L is None or n_layers < 2 else float(share_L @ depth_L),
    }


def block_weights(entries: Sequence[Entry], n_layers: int) -> np.ndarray:
    """weight_L; all 0 where the pairs that were drawn do not determine the shares of all blocks."""
    blocks_EL = np.zeros((len(entries), n_layers))
    for row, (blocks, _) in enumerate(entries):
        blocks_EL[row, [block - 1 for block in blocks]] = 1
    if any(len(blocks) > 1 for blocks, _ in entries) and np.linalg.matrix_rank(blocks_EL) < n_layers:
        return np.zeros(n_layers)
    return nnls(blocks_EL, np.array([value for _, value in entries], dtype=float))[0]


def entries_of(score: Quantity, layers: Iterable[Row], pairs: Iterable[Row]) -> list[Entry]:
    """The rows that a score averages, from the rows of one run by layer and by pair."""
    rows = [row for row in (layers if score.carried_by == "layer" else pairs) if row["metric"] == score.metric]
    if score.carried_by == "both":
        return [((row["layer"], row["other_layer"]), row["value"]) for row in rows]
    return [((row["layer"],), row["value"]) for row in rows]
