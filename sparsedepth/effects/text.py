"""The frame `effects` as one table and one paragraph, and the links of the chain as a table and sentences: the same in
the terminal and in the report."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from sparsedepth.effects.cells import Cells, values_of
from sparsedepth.effects.chain import MIN_UNITS, Intervention, Link, LinkEvidence, Skill, cautions, chain_evidence
from sparsedepth.effects.frame import OWN_LR, QUESTIONS, Effect, compared, setting_effects
from sparsedepth.quantities.levels import ALPHA, POWER
from sparsedepth.store.comparable_loss import layers_hint, loss_of
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.small_sample import t_critical
from sparsedepth.words.effects import budget_text, lr_text, nothing_text, setting_text, size_text, title
from sparsedepth.words.plain_text import counted, wrapped
from sparsedepth.words.table import fitted_table

OPTIONAL = ("diverged", "basis", "seeds", "flops", "lr", "detectable")
DETAIL = ("p_adjusted", "df", "seeds_part", "lr_part")
REASONS_SHOWN = 6
EXPLAINED = (
    "rho: rank correlation within depth (lo, hi: 95% interval over settings, each with all its runs); "
    "skill: prediction of held-out depths, 1 perfect, 0 no better than their mean; intervention "
    "'confounded': not shown to move only the cause; verdict: associated (rho significant, adjusted over the links), "
    "predicts (and skill above 0), causes (an intervention that moved only the cause moved the effect; other paths, "
    f"such as another tuned lr, are not excluded), '-' not distinguishable from 0, 'too few': {MIN_UNITS} "
    "settings are needed for an interval"
)


def effects_text(effects: pd.DataFrame, cells: Cells, detail: bool = False) -> str:
    """The effects of a frame for a terminal: a table, what its columns mean, and what was withheld."""
    if effects.empty:
        return nothing_text(cells)
    names = ["n_layers", "effect", "lo", "hi", "detectable", "verdict", "lr", "basis", "seeds", "diverged", "flops"]
    names += [*(DETAIL if detail else ()), "setting"]
    is_listed = detail | effects["question"].isin(QUESTIONS) | effects["verdict"].isin(["lower", "higher"])
    shown = [_cells_of(row, cells) for row in effects[is_listed].to_dict("records")]
    rows = tuple(tuple(row[name] for name in names) for row in shown)
    table = fitted_table(QueryResult(columns=tuple(names), rows=rows), OPTIONAL)
    over = "over" if cells.unit == "ln ratio" else "minus"
    lr = f", each at its own tuned {cells.field}" if cells.field else ""
    if lr and {*effects["at"].dropna()} - {"", OWN_LR}:
        lr += ", or both at the one that was run"
    head = [f"{title(cells.outcome, cells.unit)}; effect: setting {over} baseline{lr}"]
    head += [cells.settings.baseline_text if cells.settings else "", budget_text(cells)]
    notes = paragraph(effects, cells)
    if hidden := int((~is_listed).sum()):
        notes.append(f"{counted(hidden, 'effect')} not shown to change with {cells.field}: listed by --detail")
    return f"{wrapped(filter(None, head))}{table.text}\n{wrapped(notes)}".rstrip("\n")


def _cells_of(row: dict[str, Any], cells: Cells) -> dict[str, Any]:
    known = {name: None if pd.isna(value) else value for name, value in row.items()}
    if cells.unit == "ln ratio":
        sizes = {name: known[name] for name in ("estimate", "lo", "hi", "detectable")}
        known |= {name: math.exp(size) for name, size in sizes.items() if size is not None}
    return known | {
        "n_layers": known["n_layers"] or "all",
        "effect": known["estimate"],
        "lr": lr_text(row),
        "diverged": known["diverged"] or None,
        "basis": None if known["basis"] == "tokens" else known["basis"],
        "setting": setting_text(row),
    }


def paragraph(effects: pd.DataFrame, cells: Cells) -> list[str]:
    """What the columns mean, what would narrow the intervals, and why verdicts were withheld."""
    parts = " of seeds and of the choice of lr" if cells.is_tuned else " over seeds"
    explained = (
        f"lo, hi: 95% interval{parts}; 'lower', 'higher': adjusted p below {ALPHA} over the settings of a depth; "
        f"detectable: the effect that would have been seen ({POWER:.0%} power)"
    )
    withheld: dict[str, list[str]] = {}
    for row in effects[effects["reason"].fillna("") != ""].to_dict("records"):
        depth = "" if pd.isna(row["n_layers"]) else f" at n_layers={row['n_layers']}"
        withheld.setdefault(row["reason"], []).append(f"{setting_text(row)}{depth}")
    lines = [f"{'; '.join(names)}: {reason}" for reason, names in list(withheld.items())[:REASONS_SHOWN]]
    if len(withheld) > REASONS_SHOWN:
        lines.append(f"{len(withheld) - REASONS_SHOWN} more reasons: column reason of --format csv")
    if len(cells.tuned) > 1:
        also = " and ".join(cells.tuned[1:])
        lines.append(f"the curve and its error are in {cells.field} alone: {also} at the value that tuning chose")
    return [explained, *narrowing(effects, cells), *lines]


def narrowing(effects: pd.DataFrame, cells: Cells) -> list[str]:
    """'n_layers=4: seeds +-.05, choice of lr +-.07; tuning_seeds narrow it most', a sentence over all depths."""
    rows = effects[(effects["question"] == "setting") & effects["lo"].notna()]
    if not cells.is_tuned or rows.empty:
        return []
    texts = []
    for depth, at in rows.groupby(rows["n_layers"].astype(int)):
        seeds, lr = float(at["seeds_part"].median()), float(at["lr_part"].median())
        most = "more tuning_seeds" if lr > seeds else "more seeds"
        texts.append(f"{depth} layers: seeds ±{seeds:.2g}, choice of {cells.field} ±{lr:.2g} ({most} narrow it most)")
    return [f"half-widths at {'; '.join(texts)}"]


def of_knob(effects: pd.DataFrame, knob: str | None, cells: Cells) -> pd.DataFrame:
    """The rows whose setting changes a field. Raises ValueError for a field that no setting changes."""
    if knob is None:
        return effects
    fields = {setting: {*dict(changes)} for setting, changes in cells.changes.items()}
    known = {"n_layers"}.union(*fields.values())
    changes = effects["setting"].map(lambda setting: knob in fields.get(setting, ()))
    chosen = effects[effects["question"] == "depth" if knob == "n_layers" else changes]
    if knob not in known or chosen.empty:
        raise ValueError(f"no two runs differ in {knob}; these runs vary: {', '.join(sorted(known))}")
    return chosen


def equal_loss_lines(cells: Cells) -> Iterator[str]:
    """Effects on a number of layers at equal loss, since a better model needs more of its blocks whatever its setting:
    'at equal val_loss, 12 layers (within a setting -5.2 layers per nat/token, r -0.71): depth_scale=lns +0.31 (-0.2 to
    0.8)', a line for each depth; none for an outcome that is no number of layers.

    y' = y - b (loss - mean loss)       b = sum (y - mean y) (loss - mean loss) / sum (loss - mean loss)^2

    of each depth, the means within a setting at one lr and role (analysis of covariance). The half-width of an effect
    on y' grows by the error of b: h^2 + (t se_b d)^2, with d the effect on the loss."""
    loss = loss_of(cells.runs)
    if not layers_hint(cells.outcome):
        return
    on_loss = setting_effects(cells.of_outcome(loss)).set_index(["n_layers", "setting"])["estimate"]
    losses = values_of(cells.runs, loss).reindex(cells.rows.index)
    for depth, rows in cells.rows.assign(loss=losses).dropna(subset=["value", "loss"]).groupby("n_layers"):
        groups = rows.groupby(["setting", "lr", "role"], dropna=False)
        x_N, y_N = (rows[name] - groups[name].transform("mean") for name in ("loss", "value"))
        df, xx = len(rows) - groups.ngroups - 1, float((x_N**2).sum())
        if df < 2 or not xx or not y_N.any():
            continue
        slope = float((x_N * y_N).sum()) / xx
        error = math.sqrt(float(((y_N - slope * x_N) ** 2).sum()) / df / xx)
        adjusted = rows.assign(value=rows["value"] - slope * (rows["loss"] - rows["loss"].mean()))
        texts = []
        for row in setting_effects(replace(cells, rows=adjusted)).dropna(subset=["lo"]).to_dict("records"):
            middle, shift = row["estimate"], t_critical(df) * error * on_loss.get((depth, row["setting"]), np.nan)
            half = math.hypot((row["hi"] - row["lo"]) / 2, shift)
            texts.append(f"{row['setting']} {middle:+.2g} ({middle - half:+.2g} to {middle + half:+.2g})")
        if texts:
            r = slope * math.sqrt(xx / float((y_N**2).sum()))
            within = f"within a setting {slope:+.2g} layers per nat/token, r {r:+.2f}"
            yield f"at equal {loss}, {depth} layers ({within}): {'; '.join(texts)}"


def chain_lines(cells: Cells, detail: bool = False) -> Iterator[str]:
    """A row for each link; with `detail` its evidence in sentences too."""
    chain = chain_evidence(cells)
    if not chain:
        yield "no two quantities of the chain were measured in the same runs"
        return
    names = ("cause", "effect", "rho", "lo", "hi", "skill", "intervention", "verdict")
    table = fitted_table(QueryResult(columns=names, rows=tuple(map(_row, chain))), ("skill",))
    head = wrapped([f"The chain from sparsity to loss: {_counts_text(chain[0].within)}"])
    notes = wrapped([EXPLAINED, *cautions(compared(cells))])
    yield f"{head}{table.text}\n{notes}".rstrip("\n")
    for evidence in chain if detail else ():
        yield link_heading(evidence)
        yield from (f"  {line}" for line in evidence_lines(evidence))


def _row(evidence: LinkEvidence) -> tuple[str | float | None, ...]:
    within, verdict, tried = evidence.within, evidence.verdict, evidence.interventions
    shown = verdict if verdict != "not distinguishable" else "too few" if within.lo is None else "-"
    intervention = "confounded" if tried else "none"
    if any(each.is_alone for each in tried):
        intervention = "confirms" if verdict == "causes" else "no effect"
    return within.cause, within.effect, within.rho, within.lo, within.hi, evidence.skill.value, intervention, shown


def _counts_text(link: Link) -> str:
    return f"{counted(link.n_runs, 'run')} of {counted(link.n_settings, 'setting')}"


def link_heading(evidence: LinkEvidence) -> str:
    return f"{evidence.within.cause} -> {evidence.within.effect}: {evidence.verdict}"


def evidence_lines(evidence: LinkEvidence) -> Iterator[str]:
    yield from map(_link_text, evidence.links)
    yield _skill_text(evidence.skill)
    yield from map(_intervention_text, evidence.interventions)
    if not evidence.interventions:
        yield "no intervention on this cause in these runs"


def _link_text(link: Link) -> str:
    """'within depth: associated: rho -0.61 (...), adjusted p 0.02; 24 runs of 8 settings'."""
    verdict = "associated" if link.is_associated else "not distinguishable"
    rho = "rho undefined (too few runs, or one side is constant)" if link.rho is None else f"rho {link.rho:+.2f}"
    if link.lo is not None and link.hi is not None:
        p = "" if link.p_adjusted is None else f", adjusted p {link.p_adjusted:.2g}"
        rho += f" (95% interval {link.lo:+.2f} to {link.hi:+.2f}){p}"
    elif link.rho is not None:
        rho += " (too few settings for an interval)"
    left_out = f"; excluded: {link.n_missing} not measured, {link.n_diverged} diverged"
    left_out = left_out if link.n_missing or link.n_diverged else ""
    return f"{link.scope}: {verdict}: {rho}; {_counts_text(link)}{left_out}"


def _skill_text(skill: Skill) -> str:
    depths = ", ".join(map(str, skill.depths)) or "none"
    if skill.value is None:
        return f"held-out depths: skill unknown (two depths are needed; these runs have: {depths})"
    interval = "" if skill.lo is None or skill.hi is None else f" (95% interval {skill.lo:+.2f} to {skill.hi:+.2f})"
    return f"held-out depths, each of {depths} predicted from the others: skill {skill.value:+.2f}{interval}"


def _intervention_text(tried: Intervention) -> str:
    controls = "; ".join(map(_effect_text, filter(None, tried.controls)))
    alone = "other causes unchanged" if tried.is_alone else "not shown to move this cause alone"
    return (
        f"intervention {tried.moved.setting}, n_layers={tried.moved.n_layers}: {_effect_text(tried.moved)}; "
        f"{alone} ({controls}); {_effect_text(tried.effect)}"
    )


def _effect_text(effect: Effect) -> str:
    if effect.estimate is None:
        return f"{effect.outcome} unknown"
    size, lo, hi = (
        "" if end is None else size_text(end, effect.unit, "+", "x") for end in (effect.estimate, effect.lo, effect.hi)
    )
    interval = f" ({lo} to {hi})" if lo and hi else ""
    return f"{effect.outcome} {effect.verdict}, {size}{interval}"


def chain_table(chain: Sequence[LinkEvidence]) -> QueryResult:
    """One row per link and scope, and one for the skill; `word` is the link's verdict."""
    columns = ("cause", "effect", "word", "scope", "rho", "lo", "hi", "p_adjusted", "runs", "settings")
    columns += ("missing", "diverged")
    rows = []
    for evidence in chain:
        head, skill = (evidence.within.cause, evidence.within.effect, evidence.verdict), evidence.skill
        scopes = [(link.scope, link.rho, link.lo, link.hi, link.p_adjusted, link) for link in evidence.links]
        for *numbers, link in [*scopes, ("held-out skill", skill.value, skill.lo, skill.hi, None, evidence.within)]:
            rows.append((*head, *numbers, link.n_runs, link.n_settings, link.n_missing, link.n_diverged))
    return QueryResult(columns=columns, rows=tuple(rows))
