"""Labels of configurations: how each differs from the baseline, such as 'n_kv_heads=1, depth_scale=lns'.

The *baseline* is the configuration nearest to the baseline values of all fields: the least sparse value run
(`sparsity_rank`), or RunConfig's default where no value is sparser than another. Nearest: it differs in the fewest
fields that vary and were not tuned (ties: the shallowest, then the first cell_id). Depth and tuned fields have columns
of their own and are no part of a label; nor are sizes and data that follow from depth and the rest of the label, such
as a task's vocabulary or a budget of tokens per parameter."""

import functools
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from sparsedepth.config.model import FILLED_FROM, with_derived_sizes
from sparsedepth.config.presets import REMEDIES
from sparsedepth.config.role import roles
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.quantities.quantity import Row
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.schema import stored_fields, stored_value
from sparsedepth.store.search import definitions_of
from sparsedepth.store.tuning_roles import IS_CHOSEN, IS_POINT, IS_RESULT, IS_TRAINED, parse_tuned_fields
from sparsedepth.words.differences import setting_label
from sparsedepth.words.values import assignment, number_text

if TYPE_CHECKING:
    from sparsedepth.store.connection import Store

_ROLES = roles(RunConfig)
BUDGET = "train_tokens"


@functools.cache
def _defaults() -> Row:
    """RunConfig's defaults, as stored in `runs`."""
    return stored_fields(RunConfig())


@functools.cache
def _remedies() -> dict[str, set[str]]:
    """The assignments of each remedy that has several."""
    several = {name: remedy.fields for name, remedy in REMEDIES.items() if len(remedy.fields) > 1}
    stored = {name: stored_fields(RunConfig(**fields)) for name, fields in several.items()}
    return {name: {assignment(field, stored[name][field]) for field in fields} for name, fields in several.items()}


def by_preset(changes: Row) -> Row:
    """The fields that a setting changes; in place of all those of a remedy its name, as a sweep is given it:
    'preset=mhc' for 'n_streams=4, stream_mixing=manifold'."""
    texts = {assignment(field, value): field for field, value in changes.items()}
    for name, own in _remedies().items():
        if own <= texts.keys():
            return {"preset": name} | {field: changes[field] for text, field in texts.items() if text not in own}
    return changes


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What a label is derived from."""

    cell_id: str
    model: str | None = None
    """Name of a model that was only measured, whose unstated knobs are not known."""
    tuned: frozenset[str] = frozenset()
    """Fields whose values tuning chose."""
    knobs: Row
    params: float | None = None
    flops: float | None = None
    """Total parameters and training FLOPs, means over seeds."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How the configurations of a store differ."""

    budget: ClassVar[str] = BUDGET
    """The field that labels name even where it does not differ."""
    baseline: Configuration
    varying: tuple[str, ...]
    """Fields with more than one known value."""
    tuned: tuple[str, ...]
    """Fields that vary because they were tuned."""
    label_fields: tuple[str, ...]
    """Varying fields that make up the labels."""
    data: tuple[str, ...]
    """Varying fields of the training data, without those that follow from others."""
    by_depth: Mapping[str, Mapping[int, Any]]
    """Sizes, heads, lr or weight decay that n_layers determines, such as tokens of a budget per parameter: field ->
    n_layers -> value."""

    def changes(self, knobs: Row) -> Row:
        """The fields of labels in which these differ from the baseline's."""
        known = [name for name in self.label_fields if name in knobs]
        return {name: knobs[name] for name in known if knobs[name] != self.baseline.knobs[name]}

    def named(self, knobs: Row) -> Row:
        """The same but the budget, a remedy by its name (`by_preset`)."""
        return by_preset({name: value for name, value in self.changes(knobs).items() if name != self.budget})


class Progress(NamedTuple):
    """Runs that are complete, and planned."""

    n_complete: int
    n_planned: int


def only_tuning(store: "Store") -> Progress | None:
    """How far tuning is; None where a result is complete, or no run at all."""
    sql = f"SELECT count(*), count(*) FILTER (NOT ({IS_CHOSEN})) FROM runs WHERE {IS_TRAINED}"
    ((n_trained, n_tuning),) = store.sql(sql).rows
    if not n_trained or n_tuning < n_trained:
        return None
    grids = (grid for grid in definitions_of(store.roots) if not grid.is_search)
    planned = sum(
        prod(map(len, (grid.tuned_cells(), *grid.tune.values(), grid.tuning_seeds))) * (1 + len(grid.branch_at))
        for grid in grids
    )
    return Progress(n_tuning, planned)


def pending(store: "Store") -> Progress | None:
    """How far the results of the grids are that fill these folders; None where all are complete, or none is planned."""
    grids = [grid for grid in definitions_of(store.roots) if not (grid.is_search or grid.constraints)]
    planned = sum(len(seeds) * (1 + len(grid.branch_at)) for grid in grids for _, seeds in grid.replicated_grid())
    ((n_complete,),) = store.sql(f"SELECT count(*) FROM runs WHERE {IS_RESULT}").rows
    return Progress(n_complete, planned) if n_complete < planned and len(grids) == len(store.roots) else None


def planned_configurations(roots: Sequence[Path]) -> list[Configuration]:
    """The cells of the grids that fill these folders; none of a grid that solves for a size or skips cells, whose cells
    the definition alone does not tell."""
    return [
        configuration_of(grid.first_run(cell), grid.tune)
        for grid in definitions_of(roots)
        if not (grid.is_search or grid.free or grid.constraints)
        for cell in grid.grid()
    ]


def configuration_of(config: RunConfig, tuned: Iterable[str]) -> Configuration:
    return Configuration(cell_id=config.cell_id, tuned=frozenset(tuned), knobs=stored_fields(config))


_FROM_DEPTH = ("lr", "weight_decay", "n_heads", "n_kv_heads")
"""Labels leave them out where they follow from the depth; sizes and data also where from that and the other labels."""
_TRIED_LAST = {"d_model": 1, "corpus": 2}
"""From the width a d_ff and a budget follow; the group or length of a corpus is a shorter label."""


def settings_of(cells: Sequence[Configuration], planned: Sequence[Configuration] = ()) -> Settings:
    """Settings of these cells; needs at least one. `planned`: those of an unfinished sweep, of which one may be the
    baseline; the values of tuned fields are not known for them."""
    is_tuned = frozenset[str]().union(*(cell.tuned for cell in (*cells, *planned)))
    run = {_without(cell, is_tuned) for cell in cells}
    every = [*cells, *(cell for cell in planned if _without(cell, is_tuned) not in run)]
    values = {
        name: {cell.knobs[name] for cell in (cells if name in is_tuned else every) if _is_known(cell, name)}
        for name in CELL_FIELDS
    }
    varying = tuple(name for name in CELL_FIELDS if len(values[name]) > 1)
    chosen = [name for name in varying if name not in is_tuned and name != "n_layers"]
    label_fields, by_depth = _label_fields([name for name in chosen if _is_label_field(name, every)], every)
    data = []
    for name in varying:
        if _ROLES[name].kind == "data" and not (data and _follows(name, data, every)):
            data.append(name)
    return Settings(
        baseline=_nearest_baseline(every, chosen),
        varying=varying,
        tuned=tuple(name for name in varying if name in is_tuned),
        label_fields=tuple(label_fields),
        data=tuple(data),
        by_depth=by_depth,
    )


def _label_fields(names: list[str], cells: Sequence[Configuration]) -> tuple[list[str], dict[str, Mapping[int, Any]]]:
    """The fields of labels without those that follow, and the values of those that follow from depth alone."""
    by_depth: dict[str, Mapping[int, Any]] = {}
    for name in sorted(names, key=lambda name: _TRIED_LAST.get(name, 0)):
        others = [other for other in names if other != name]
        is_size = _ROLES[name].kind in ("capacity", "data")
        if not is_size and name not in _FROM_DEPTH:
            continue
        if _follows(name, ["n_layers", *(others if is_size else ())], cells):
            names = others
            if _follows(name, ["n_layers"], cells) and not _follows(name, others, cells):
                sizes = {cell.knobs["n_layers"]: cell.knobs[name] for cell in cells if _is_known(cell, name)}
                by_depth[name] = dict(sorted(sizes.items()))
    return names, by_depth


def read_settings(store: "Store") -> Settings | None:
    """Settings of the trained configurations in a store, those of tuning included; None where there are none."""
    rows = store.sql(
        "SELECT cell_id, tuned_fields, avg(params_total) FILTER (outcome = 'ok'), "
        f"avg(train_flops) FILTER (outcome = 'ok'), {', '.join(CELL_FIELDS)} FROM runs "
        f"WHERE {IS_TRAINED} AND {IS_POINT} GROUP BY ALL"
    ).rows
    cells = [
        Configuration(
            cell_id=cell_id,
            tuned=frozenset(parse_tuned_fields(tuned)),
            params=params,
            flops=flops,
            knobs=dict(zip(CELL_FIELDS, values, strict=True)),
        )
        for cell_id, tuned, params, flops, *values in rows
    ]
    return settings_of(cells, planned_configurations(store.roots)) if cells else None


def with_setting_column(answer: QueryResult, settings: Settings) -> QueryResult:
    """The table with a last column `setting` in place of the varying fields but depth and tuned ones; parameters and
    training FLOPs relative to the baseline (`words.differences.cost_text`)."""
    costs = {"params_total": ("params", settings.baseline.params), "train_flops": ("flops", settings.baseline.flops)}
    fixed = ("n_layers", *settings.tuned)
    columns: dict[str, list[Any]] = {}
    for name, values in zip(answer.columns, answer.values(), strict=True):
        if name in costs:
            short_name, reference = costs[name]
            columns[short_name] = [relative(value, reference) for value in values]
        elif (name in fixed or name not in settings.varying) and (name != "diverged" or any(values)):
            columns[name] = [*map(number_text, values)] if name in settings.tuned else values
    if any(name in settings.label_fields for name in answer.columns):
        columns["setting"] = [setting_label(settings, row) for row in answer.records()]
    return QueryResult.from_columns(columns)


def relative(value: float | None, reference: float | None) -> float | None:
    """A cost over that of the baseline; None where either is unknown."""
    return value / reference if value and reference else None


def _is_label_field(name: str, cells: Sequence[Configuration]) -> bool:
    """Whether a varying field belongs in labels: no field of measuring or recording, and one of experts only where
    it varies between models with experts."""
    role, of_experts = _ROLES[name], {cell.knobs[name] for cell in cells if cell.knobs["n_experts"]}
    return role.kind not in ("measure", "record") and (not role.needs_experts or len(of_experts) > 1)


def _without(cell: Configuration, fields: Container[str]) -> tuple[Any, ...]:
    return tuple(cell.knobs[name] for name in CELL_FIELDS if name not in fields)


def _follows(name: str, others: Sequence[str], cells: Sequence[Configuration]) -> bool:
    """Whether the other fields determine this one's value."""
    values: dict[tuple[Any, ...], Any] = {}
    return all(
        cell.knobs[name] == values.setdefault(tuple(cell.knobs[other] for other in others), cell.knobs[name])
        for cell in cells
    )


def sparsity_rank(name: str, values: Row) -> tuple[float, float]:
    """Sort key of a field's value in a configuration, the least sparse first: no experts before many."""
    value = values[name]
    number = float(value) if isinstance(value, int | float) else 0.0
    if name == "n_experts":
        active = values.get("top_k")
        return (float(number > 0), -float(active if isinstance(active, int) else 1) / max(number, 1.0))
    role = _ROLES[name]
    if role.sparser_direction or role.kind == "depth":
        return (0.0, -number if role.sparser_direction == "less" else number)
    return (float(stored_value(value) != _defaults()[name]), number)


def _nearest_baseline(cells: Sequence[Configuration], chosen: Sequence[str]) -> Configuration:
    """The cell that differs in the fewest of the chosen fields from their baseline values."""
    trained = [cell for cell in cells if cell.model is None] or cells
    sparsity_fields = [name for name in chosen if _ROLES[name].sparser_direction or name == "n_experts"]
    least = {name: min(sparsity_rank(name, cell.knobs) for cell in trained) for name in sparsity_fields}

    def distance(cell: Configuration) -> tuple[int, tuple[float, float], str]:
        sparser = sum(sparsity_rank(name, cell.knobs) != rank for name, rank in least.items())
        # What a watched training or a table does not state is taken as unchanged.
        changed = sum(
            cell.knobs[name] not in (None, _default(name, cell.knobs)) for name in chosen if name not in least
        )
        return sparser + changed, sparsity_rank("n_layers", cell.knobs), cell.cell_id

    return min(trained, key=distance)


def _default(name: str, knobs: Row) -> Any:
    """The value of a field that is left out; of a size that follows from others (n_kv_heads from n_heads), theirs."""
    if not _ROLES[name].derived_if_missing:
        return _defaults()[name]
    return with_derived_sizes({other: knobs[other] for other in FILLED_FROM if other != name}).get(name)


def _is_known(cell: Configuration, knob: str) -> bool:
    """Whether the knob's value is known: NULL is a value in a trained run, and unknown in a measured model."""
    return cell.model is None or cell.knobs[knob] is not None
