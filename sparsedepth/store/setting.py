"""A configuration in a few words: what it has away from the baseline, such as 'n_kv_heads=1, depth_scale=lns'.

The *baseline* is the configuration nearest to the baselines of all knobs, each field's least sparse value of those that
were run (`sparsity_rank`), or RunConfig's default where no value is sparser than another: it differs from them in the
fewest of the fields that vary and were not tuned (of equals the first cell_id). Depth is no part of a setting: it
has a column of its own, and so has what was tuned. A size or a fact of the data that follows from depth and the rest
of the setting, such as the vocabulary of a task or a budget of tokens per parameter, is not said.
"""

import functools
import json
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sparsedepth.config.model import FILLED_FROM, ModelConfig
from sparsedepth.config.role import roles
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.store import render
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.tuning_roles import IS_RESULT, parse_tuned_fields

if TYPE_CHECKING:
    from sparsedepth.store.connection import Store

_ROLES = roles(RunConfig)


@functools.cache
def _defaults() -> Mapping[str, Any]:
    """As the columns of `runs` hold them."""
    fields = RunConfig().model_dump(mode="json").items()
    return {name: json.dumps(value) if isinstance(value, list) else value for name, value in fields}


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """What a setting is told from."""

    cell_id: str
    model: str | None = None
    """Of a measured model, whose other knobs are not known."""
    tuned: frozenset[str] = frozenset()
    """The fields whose values tuning chose."""
    knobs: Mapping[str, Any]
    params: float | None = None
    """All of them; mean over seeds, as is `flops`."""
    flops: float | None = None
    """Of training."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What tells the configurations of a store apart."""

    baseline: Configuration
    varying: tuple[str, ...]
    """The fields of which the cells state more than one value."""
    tuned: tuple[str, ...]
    """Those of them that vary because they were tuned."""
    label_fields: tuple[str, ...]
    """Those of them that make up its label."""
    data: tuple[str, ...]
    """Those that say which data they are trained on, less what follows from the others."""
    by_depth: Mapping[str, Mapping[int, Any]]
    """Sizes that n_layers determines, such as the tokens of a budget per parameter: their value at each."""

    @property
    def data_text(self) -> str:
        """Why losses of these configurations do not compare; empty where the data are the same."""
        names = ", ".join(self.data)
        return f"configurations differ in {names}: losses on different data do not compare" if names else ""

    @property
    def depth_text(self) -> str:
        """'train_tokens goes with n_layers: 1347584 at 4, 6389760 at 24', a line each."""
        lines = []
        for name, sizes in self.by_depth.items():
            stated = ", ".join(f"{render.readable(size)} at {depth}" for depth, size in sizes.items())
            lines.append(f"{name} goes with n_layers: {stated}")
        return "\n".join(lines)

    def cost_text(self, columns: Container[str]) -> str:
        """'params, flops (of training): over those of the baseline with 12 layers, 124128 and 6.393e+11'; empty where
        no column is a cost."""
        of_baseline = {"params": self.baseline.params, "flops": self.baseline.flops}
        shown = {name: render.readable(value) for name, value in of_baseline.items() if name in columns}
        depth = f" with {self.baseline.knobs['n_layers']} layers" if "n_layers" in self.varying else ""
        names = ", ".join(shown).replace("flops", "flops (of training)")
        return f"{names}: over those of the baseline{depth}, {' and '.join(shown.values())}" if shown else ""

    def label(self, knobs: Mapping[str, Any]) -> str:
        """'n_kv_heads=1, depth_scale=lns': the fields away from the baseline's; 'baseline' where there are none."""
        differing = [name for name in self.label_fields if name in knobs and knobs[name] != self.baseline.knobs[name]]
        return ", ".join(assignment(name, knobs[name]) for name in differing) or "baseline"


def settings_of(cells: Sequence[Configuration]) -> Settings:
    """Settings of these cells; needs at least one."""
    stated = {name: {cell.knobs[name] for cell in cells if _states(cell, name)} for name in CELL_FIELDS}
    varying = tuple(name for name in CELL_FIELDS if len(stated[name]) > 1)
    tuned = tuple(name for name in varying if any(name in cell.tuned for cell in cells))
    label_fields = [name for name in varying if name not in (*tuned, "n_layers") and _is_label_field(name, cells)]
    by_depth: dict[str, Mapping[int, Any]] = {}
    # The width is what was set, d_ff and a budget follow from it; a task's name is shorter, by its group or length.
    for name in sorted(label_fields, key=lambda name: (name == "corpus", name == "d_model")):
        others = [other for other in label_fields if other != name]
        if _ROLES[name].kind in ("capacity", "data") and _follows(name, ["n_layers", *others], cells):
            label_fields = others
            if not _follows(name, others, cells) and _follows(name, ["n_layers"], cells):
                sizes = {cell.knobs["n_layers"]: cell.knobs[name] for cell in cells if _states(cell, name)}
                by_depth[name] = dict(sorted(sizes.items()))
    data: list[str] = []
    for name in varying:
        if _ROLES[name].kind == "data" and not (data and _follows(name, data, cells)):
            data.append(name)
    return Settings(
        baseline=_nearest_baseline(cells, [name for name in varying if name not in tuned]),
        varying=varying,
        tuned=tuned,
        label_fields=tuple(label_fields),
        data=tuple(data),
        by_depth=by_depth,
    )


def read_settings(store: "Store") -> Settings | None:
    """Settings of the configurations that were trained in a store; None where there are none."""
    rows = store.sql(
        "SELECT cell_id, tuned_fields, avg(params_total) FILTER (outcome = 'ok'), "
        f"avg(train_flops) FILTER (outcome = 'ok'), {', '.join(CELL_FIELDS)} FROM runs WHERE {IS_RESULT} GROUP BY ALL"
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
    return settings_of(cells) if cells else None


def with_setting_column(answer: QueryResult, settings: Settings) -> QueryResult:
    """A table whose fields, but depth and what was tuned, stand in one column at its end, `setting`; parameters and
    training FLOPs are in those of the baseline (`Settings.cost_text`)."""
    costs = {"params_total": ("params", settings.baseline.params), "train_flops": ("flops", settings.baseline.flops)}
    kept = ("n_layers", *settings.tuned)
    fields = [name for name in answer.columns if name in settings.label_fields]
    shown = [
        name
        for name, *values in zip(answer.columns, *answer.rows, strict=True)
        if (name in kept or name not in settings.varying) and (name != "diverged" or any(values))
    ]

    def value(name: str, row: Mapping[str, Any]) -> Any:
        if name in costs:
            unit = costs[name][1]
            return row[name] and unit and row[name] / unit
        return number_text(row[name]) if name in settings.tuned else row[name]

    rows = answer.records()
    columns = [costs[name][0] if name in costs else name for name in shown]
    table = [[value(name, row) for name in shown] for row in rows]
    if fields:
        columns.append("setting")
        table = [[*values, settings.label(row)] for values, row in zip(table, rows, strict=True)]
    return QueryResult(columns=tuple(columns), rows=tuple(map(tuple, table)))


def number_text(value: Any) -> str | None:
    """A tuned value as it was written: 0.003."""
    return f"{value:g}" if isinstance(value, int | float) else value


def assignment(name: str, value: Any) -> str:
    """'n_kv_heads=1': a field's value as every table, sentence and figure names it, and `--set` takes it."""
    if value is None:
        return f"{name} unset"
    return f"{name}={int(value) if isinstance(value, float) and value.is_integer() else value}"


def _is_label_field(name: str, cells: Sequence[Configuration]) -> bool:
    """Whether a field that varies belongs to a setting: not how a run was judged, nor what only says 'dense'."""
    of_experts = {cell.knobs[name] for cell in cells if cell.knobs["n_experts"]}
    return _ROLES[name].kind not in ("measure", "record") and (not _ROLES[name].needs_experts or len(of_experts) > 1)


def _follows(name: str, others: Sequence[str], cells: Sequence[Configuration]) -> bool:
    """Whether a field's value is known wherever those of the others are."""
    values: dict[tuple[Any, ...], Any] = {}
    return all(
        cell.knobs[name] == values.setdefault(tuple(cell.knobs[other] for other in others), cell.knobs[name])
        for cell in cells
    )


def sparsity_rank(name: str, values: Mapping[str, Any]) -> tuple[float, float]:
    """Sorts the least sparse value of a field first, from a configuration's values: no experts before many."""
    value = values[name]
    number = float(value) if isinstance(value, int | float) else 0.0
    if name == "n_experts":
        active = values.get("top_k")
        return (float(number > 0), -float(active if isinstance(active, int) else 1) / max(number, 1.0))
    if _ROLES[name].sparser_direction:
        return (0.0, number if _ROLES[name].sparser_direction == "more" else -number)
    if _ROLES[name].kind == "depth":
        return (0.0, number)
    stated = json.dumps(value) if isinstance(value, tuple) else value
    return (float(stated != _defaults()[name]), number)


def _nearest_baseline(cells: Sequence[Configuration], chosen: Sequence[str]) -> Configuration:
    """The cell that differs in the fewest of the chosen fields from what each has at the baseline."""
    known = [cell for cell in cells if cell.model is None] or cells
    ranked = [name for name in chosen if _ROLES[name].sparser_direction or name == "n_experts"]
    least = {name: min(sparsity_rank(name, cell.knobs) for cell in known) for name in ranked}

    def away(cell: Configuration) -> tuple[int, str]:
        sparser = sum(sparsity_rank(name, cell.knobs) != rank for name, rank in least.items())
        others = (name for name in chosen if name not in least)
        return sparser + sum(cell.knobs[name] != _default(name, cell.knobs) for name in others), cell.cell_id

    return min(known, key=away)


def _default(name: str, knobs: Mapping[str, Any]) -> Any:
    """What a field would be if it were left out: of a size that follows from others (n_kv_heads from n_heads), that."""
    if not _ROLES[name].derived_if_missing:
        return _defaults()[name]
    return getattr(_shape(tuple((other, knobs[other]) for other in FILLED_FROM if other != name)), name)


@functools.lru_cache(maxsize=4096)
def _shape(sizes: tuple[tuple[str, int | None], ...]) -> ModelConfig:
    """A model of these sizes, the others filled in; the cells of a sweep share few of them."""
    return ModelConfig.model_validate({name: size for name, size in sizes if size is not None})


def _states(cell: Configuration, knob: str) -> bool:
    """Whether the cell says what the knob was: a NULL of a trained run is a setting, of a measured model not known."""
    return cell.model is None or cell.knobs[knob] is not None
