"""The knobs of a store: the fields that its runs vary, and their settings.

A *knob* is a set of RunConfig fields that change together, named after the first of them:

- n_experts, top_k and d_expert are one knob: without experts the other two have no meaning.
- A size that has RunConfig's own default (n_kv_heads, d_ff, d_expert) in every run is not a choice.
- Field B belongs to field A's knob if A determines B: no two runs agree in A and differ in B, so their effects cannot
  be separated. Fields that n_layers determines belong to depth.

Never knobs: the seed (a replicate), depth (the stratum), and how a run is measured; runs measured differently are not
paired. Models that were only measured (`model` is not NULL) have no known choices: they are in no knob and no pair.
The *baseline* of a knob is its least sparse setting (`Role.sparser_direction`): no weight decay, the shortest context,
the most key/value heads, no experts; for a field that has none RunConfig's default, or else the smallest value.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth.config.model import FILLED_FROM, with_derived_sizes
from sparsedepth.config.role import fields_where, roles
from sparsedepth.config.run import REPLICATE_FIELDS, RunConfig
from sparsedepth.store.setting import assignment, sparsity_rank
from sparsedepth.store.tuning_roles import parse_tuned_fields, result_rows, without_measured_models

Plain = bool | int | float | str | tuple | None

ROLES = roles(RunConfig)
OF_EXPERTS = fields_where(RunConfig, lambda role: role.needs_experts)
"""Fields without effect in a dense model: part of the experts knob where n_experts determines them."""
EXPERTS = ("n_experts", *(name for name in OF_EXPERTS if RunConfig.model_fields[name].default is None))
DERIVED = fields_where(RunConfig, lambda role: role.derived_if_missing)
SIZES = fields_where(RunConfig, lambda role: role.is_matched)
"""The fields that a sweep solves for to match its runs."""
WITHOUT_EFFECT = fields_where(RunConfig, lambda role: role.kind == "record")
NEVER_KNOBS = fields_where(RunConfig, lambda role: role.kind in ("replicate", "depth", "measure", "record"))
LEADERS = tuple(
    sorted((name for name in ROLES if ROLES[name].label_priority), key=lambda name: ROLES[name].label_priority or 0)
)
"""Of two fields that determine each other, the first in this order names the knob."""


@dataclass(frozen=True, kw_only=True)
class Knob:
    name: str
    fields: tuple[str, ...]
    settings: dict[str, dict[str, Plain]]
    """Setting as text -> value of each field; the baseline first, then by sparsity where that has a meaning."""

    @property
    def is_pure(self) -> bool:
        """Whether one choice changes alone (experts count as one), so that an effect can be attributed to it. A size
        may change with it to compensate its cost: that is how a sweep matches parameters or FLOPs."""
        changed = {*self.fields[:1], *(name for name in self.fields if name not in SIZES)}
        return len(changed) == 1 or changed <= {*EXPERTS, *OF_EXPERTS}

    @property
    def baseline(self) -> str:
        return next(iter(self.settings))


@dataclass(frozen=True, kw_only=True)
class Design:
    """The fields that runs vary."""

    chosen: tuple[str, ...]
    """`chosen_fields`."""
    with_depth: tuple[str, ...]
    """The chosen fields that n_layers determines."""
    with_tuning: tuple[str, ...]
    """The chosen fields of all runs, those of tuning included: a configuration may have no result yet."""

    @property
    def beside_depth(self) -> tuple[str, ...]:
        """The chosen fields but n_layers and those that it determines."""
        return tuple(name for name in self.chosen if name not in {"n_layers", *self.with_depth})


def plain(value: Any) -> Plain:
    """A cell of a frame as a plain value: NaN and NA -> None, whole floats -> int, arrays and JSON arrays -> tuples."""
    if isinstance(value, str) and value.startswith("["):
        try:
            value = json.loads(value)
        except ValueError:
            return value
    if isinstance(value, list | tuple | np.ndarray):
        return tuple(plain(entry) for entry in value)
    if value is None or value is pd.NA or value is pd.NaT:
        return None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float):
        if np.isnan(value):
            return None
        return int(value) if value.is_integer() and abs(value) < 2**53 else value
    return value


def value_order(option: object) -> tuple[bool, float, str]:
    """Numbers by size, then others by name."""
    is_number = isinstance(option, int | float)
    return (not is_number, float(option) if is_number else 0.0, repr(option))


def keys(runs: pd.DataFrame, fields: Sequence[str]) -> pd.Series:
    """A text per run; two are equal exactly where all `fields` are (NULL equals NULL)."""
    columns = [_texts(runs[name]) for name in fields]
    rows = zip(*columns, strict=True) if columns else ([] for _ in range(len(runs)))
    return pd.Series(["\x1f".join(row) for row in rows], index=runs.index, dtype=object)


def _texts(values: pd.Series) -> list[str]:
    """The repr of every plain value, computed once per distinct value."""
    try:
        codes, distinct = pd.factorize(values, use_na_sentinel=False)
    except TypeError:  # unhashable lists, in frames that do not come from a store
        return [repr(plain(value)) for value in values]
    texts = [repr(plain(value)) for value in distinct]
    return [texts[code] for code in codes]


def tuned_fields(runs: pd.DataFrame) -> set[str]:
    """The fields that were tuned in any of these runs; a tuned value is no choice, nor is that of a folder with a fixed
    one beside it."""
    texts = runs["tuned_fields"].dropna().unique() if "tuned_fields" in runs.columns else ()
    return {name for text in texts for name in parse_tuned_fields(text)}


def chosen_fields(runs: pd.DataFrame) -> list[str]:
    """The RunConfig fields that vary, can change a result, and were not tuned or derived from other sizes; leaders
    first."""
    return _chosen(result_rows(runs))


def _chosen(runs: pd.DataFrame) -> list[str]:
    names = dict.fromkeys((*LEADERS, *RunConfig.model_fields))
    excluded = {*WITHOUT_EFFECT, *tuned_fields(runs), *REPLICATE_FIELDS} - {"seed"}
    names = [name for name in names if name in runs.columns and name not in excluded]
    varying = [name for name in names if runs[name].nunique(dropna=False) > 1]
    return [name for name in varying if name not in DERIVED or not _is_derived(runs, name)]


def _is_derived(runs: pd.DataFrame, name: str) -> bool:
    sizes = [field for field in dict.fromkeys((*FILLED_FROM, *DERIVED)) if field in runs.columns]
    first = ~keys(runs, sizes).duplicated()
    columns = [[plain(value) for value in runs.loc[first, field]] for field in sizes]
    return all(_has_default(name, dict(zip(sizes, row, strict=True))) for row in zip(*columns, strict=True))


def _has_default(name: str, sizes: Mapping[str, Plain]) -> bool:
    """Whether a configuration of these other sizes has this value of `name` by default."""
    given = {field: value for field, value in sizes.items() if value is not None}
    filled = with_derived_sizes({field: value for field, value in given.items() if field != name})
    return filled.get(name) == given.get(name)


def design_of(runs: pd.DataFrame) -> Design:
    """The design of these runs; compute it once for many contrasts."""
    trained, runs = without_measured_models(runs), result_rows(runs)
    chosen = _chosen(runs)
    codes = {name: pd.factorize(keys(runs, [name]))[0] for name in chosen}
    with_depth = [
        name
        for name in codes
        if "n_layers" in codes and name not in NEVER_KNOBS and _determines(codes["n_layers"], codes[name])
    ]
    with_tuning = chosen if len(trained) == len(runs) else _chosen(trained)
    return Design(chosen=tuple(chosen), with_depth=tuple(with_depth), with_tuning=tuple(with_tuning))


def depth_knob(runs: pd.DataFrame) -> Knob | None:
    """Depth as a knob: n_layers and the fields that it determines, shallowest first; None if runs have one depth."""
    design = design_of(runs)
    return _knob(runs, ("n_layers", *design.with_depth), {}) if "n_layers" in design.chosen else None


def find_knobs(runs: pd.DataFrame, baselines: Mapping[str, Plain] | None = None) -> list[Knob]:
    """The knobs of these runs, depth excepted. `baselines` overrides a baseline: {'weight_decay': 0.1}.

    Raises ValueError for a baseline that no run has.
    """
    runs = result_rows(runs)
    varying = [name for name in design_of(runs).beside_depth if name not in NEVER_KNOBS]
    experts = tuple(name for name in EXPERTS if name in varying)
    units = [experts if name in experts[:1] else (name,) for name in varying if name not in experts[1:]]
    codes = [pd.factorize(keys(runs, unit))[0] for unit in units]

    def leads(a: int, b: int) -> bool:
        return a != b and _determines(codes[a], codes[b]) and (a < b or not _determines(codes[b], codes[a]))

    leaders = [b for b in range(len(units)) if not any(leads(a, b) for a in range(len(units)))]
    groups = {a: list(units[a]) for a in leaders}
    for b in range(len(units)):
        if b not in groups:
            groups[next(a for a in leaders if leads(a, b))].extend(units[b])
    knobs = [_knob(runs, tuple(fields), baselines or {}) for fields in groups.values()]
    for name, value in (baselines or {}).items():
        if not any(name == knob.name for knob in knobs) and plain(value) not in map(plain, runs[name]):
            raise ValueError(f"no run has the baseline {name}={value!r}; leave it out, or name a setting that was run")
    return knobs


def find_knob(runs: pd.DataFrame, field: str) -> Knob | None:
    """The knob that `field` belongs to, or None if it does not vary by itself; for 'n_layers', depth."""
    if field == "n_layers":
        return depth_knob(runs)
    return next((knob for knob in find_knobs(runs) if field in knob.fields), None)


def joint_knob(runs: pd.DataFrame, knobs: Sequence[Knob], baseline: Mapping[str, Plain]) -> Knob:
    """Several knobs as one, whose settings are the combinations that were run. `baseline`: a value for each field.

    Raises ValueError if no run has the baseline.
    """
    fields = tuple(name for knob in knobs for name in knob.fields)
    joint = _knob(runs, fields, {})
    text = setting_text({name: baseline[name] for name in fields})
    if text not in joint.settings:
        raise ValueError(f"no run has {text}; the runs have: {'; '.join(joint.settings)}")
    return Knob(name=joint.name, fields=fields, settings={text: joint.settings[text], **joint.settings})


def labels(runs: pd.DataFrame, knob: Knob) -> pd.Series:
    """Each run's setting of a knob, as `Knob.settings` names it."""
    codes, distinct = pd.factorize(keys(runs, knob.fields))
    first = [int(np.argmax(codes == code)) for code in range(len(distinct))]
    texts = [setting_text({name: plain(runs[name].iloc[row]) for name in knob.fields}) for row in first]
    return pd.Series([texts[code] for code in codes], index=runs.index, dtype=object)


def changed(runs: pd.DataFrame, knobs: Sequence[Knob]) -> pd.Series:
    """The knobs that differ from their baseline in each run: {'depth_scale': 'depth_scale=lns'}."""
    by_knob = [(knob, labels(runs, knob).tolist()) for knob in knobs]
    rows = [{knob.name: texts[i] for knob, texts in by_knob if texts[i] != knob.baseline} for i in range(len(runs))]
    return pd.Series(rows, index=runs.index, dtype=object)


def field_values(knobs: Iterable[Knob], settings: Mapping[str, str]) -> dict[str, Plain]:
    """The value of each field of the knobs, from the setting of each."""
    return {name: value for knob in knobs for name, value in knob.settings[settings[knob.name]].items()}


def setting_text(setting: Mapping[str, Plain]) -> str:
    """'n_experts=8, top_k=2': the name of a setting, without fields that have no value."""
    named = [assignment(name, value) for name, value in setting.items() if value is not None]
    return ", ".join(named) or f"{next(iter(setting))} unset"


def _determines(codes_a: np.ndarray, codes_b: np.ndarray) -> bool:
    return len(set(zip(codes_a, codes_b, strict=True))) == len(set(codes_a))


def _knob(runs: pd.DataFrame, fields: tuple[str, ...], baselines: Mapping[str, Plain]) -> Knob:
    runs = result_rows(runs)
    first = ~keys(runs, fields).duplicated()
    rows = [{name: plain(row[name]) for name in fields} for _, row in runs.loc[first, list(fields)].iterrows()]
    rows.sort(key=lambda setting: (sparsity_rank(fields[0], setting), setting_text(setting)))
    if fields[0] in baselines:
        baseline = plain(baselines[fields[0]])
        if not any(row[fields[0]] == baseline for row in rows):
            have = ", ".join(str(row[fields[0]]) for row in rows)
            raise ValueError(f"no run has the baseline {fields[0]}={baseline!r}; the runs have: {have}")
        rows.sort(key=lambda setting: setting[fields[0]] != baseline)
    return Knob(name=fields[0], fields=fields, settings={setting_text(row): row for row in rows})
