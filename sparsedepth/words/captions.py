"""Words of figures: labels that fit beside their axes, and the sentences of captions and titles."""

import math
import textwrap
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from sparsedepth.quantities import BY_LAYER, IN_RUNS, quantity_of_map
from sparsedepth.quantities.quantity import WATCHED, Row
from sparsedepth.words.plain_text import commas, counted, interval, sentence_of
from sparsedepth.words.scaling import crossover_sentence, law_text, units_text

if TYPE_CHECKING:
    import pandas as pd

    from sparsedepth.effects.chain import Link
    from sparsedepth.plots.facets import Panel
    from sparsedepth.plots.layer_profile import LayerProfile
    from sparsedepth.scaling.crossover import Crossover
    from sparsedepth.scaling.fit_law import Bootstrap, FittedLaw
    from sparsedepth.scaling.law import Term

LONGEST = 30
"""Characters of a setting's name next to an axis."""
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
DEGENERATE = "†"
"""After a degenerate score, as in the report."""
CHANGES_VARIANCE = ", which also changes residual variance"
"""Caution about a tuned lr, wherever a figure compares the variances of settings."""

# Labels


def escaped(text: str) -> str:
    """Text shown literally: matplotlib reads text between dollar signs as a formula."""
    return text.replace("$", r"\$")


def shortened(text: str) -> str:
    """A setting's name with as many fields as fit, and the number of further ones."""
    if len(text) <= LONGEST:
        return text
    fields = text.split(", ")
    for n in range(len(fields) - 1, 0, -1):
        if len(kept := commas(fields[:n])) + 4 <= LONGEST:
            return f"{kept}, {len(fields) - n} more"
    return text[: LONGEST - 1] + "…"


def folded(text: str, width: int = LONGEST) -> str:
    """In lines of `width`, wider for a word up to LONGEST: half of 'train_tokens=1000000000' reads as another."""
    longest = min(LONGEST, max(map(len, text.split()), default=1))
    return "\n".join(textwrap.wrap(text, max(width, longest), break_on_hyphens=False))


def decade(value: float, least: float = 0.0) -> str:
    """'10⁻²': as text, since matplotlib takes longer to set a formula than to draw its axis. Empty inside the linear
    part, where it would lie over the 0."""
    if value == 0 or abs(value) < least:
        return "" if value else "0"
    power = str(round(math.log10(abs(value)))).translate(SUPERSCRIPTS)
    return f"{'−' if value < 0 else ''}10{power}"


def title_of_map(metric: str) -> str:
    return quantity_of_map(metric).axis_label.replace("\n", " ")


def lr_change(row: Row) -> str:
    """'0.003 → 0.006', baseline first; '' unless the sides have different tuned lr."""
    before = row["lr_baseline"]
    after = row["lr"]
    return f"{before:g} → {after:g}" if abs(before - after) > 0 else ""  # NaN of an unknown one is never above 0


def rho_text(found: "Link") -> str:
    """'ρ = +0.42 [-0.10, +0.76]'."""
    if found.rho is None:
        return "ρ undefined"
    return f"ρ = {found.rho:+.2f}" + ("" if found.lo is None else f" [{found.lo:+.2f}, {found.hi:+.2f}]")


# Sentences of captions


def not_shown(n: int, noun: str, why: str = "") -> str:
    """' Not shown: 3 further settings.'; '' of none."""
    return f" Not shown: {counted(n, noun)}{why}." if n else ""


def means_text(points: "pd.DataFrame") -> str:
    """'Mean over 3 to 16 seeds, 95% interval.', without the interval where no point has one; 'One run each.'"""
    few = points["n_seeds"].min()
    most = points["n_seeds"].max()
    seeds = counted(most, "seed") if few == most else f"{few} to {most} seeds"
    return "One run each." if most == 1 else f"Mean over {seeds}{', 95% interval' * bool(points['lo'].notna().any())}."


def parts_note(forms: Collection[str], first: str, kinds: Iterable["Panel"], drawn: Collection["Panel"]) -> str:
    """What the panels that are drawn say; ' Each setting stands beside baseline (black); ...'; '' of plain ones that
    are all drawn."""
    text = "".join(dict.fromkeys(panel.note for panel in drawn))
    text += f" Each setting stands beside {first} (black); pale: the others." * ("apart" in forms)
    text += " Small points: single seeds." * ("seeds" in forms)
    text += " Points of one x stand side by side." * ("beside" in forms)
    text += " Intervals are cut where the axis ends." * ("cut" in forms)
    text += " Heat maps show means; their intervals are in the CSV." * ("map" in forms)
    return text + same_note([panel.y_label.replace("\n", " ") for panel in kinds if panel not in drawn])


def same_note(names: Sequence[str]) -> str:
    return f" Not drawn, as it is the same everywhere: {commas(names)}." if names else ""


def point_text(panel: "Panel", row: Row) -> str:
    """'n_layers 12: validation loss (nat/token) 0.531 (0.39 to 0.67), 3 seeds'"""
    label = panel.y_label.replace("\n", " ")
    value = f"{row['mean']:.4g}{interval(row['lo'], row['hi'], '.4g')}"
    return f"{panel.x_label} {row['x']:.4g}: {label} {value}, {counted(int(row['n_seeds']), 'seed')}"


def run_text(row: Row, x: str, y: str) -> str:
    """'weight_decay=0.1: weight_sparsity 0.12, val_loss 1.23'"""
    return f"{row.get('setting', '')}: {x} {row[x]:.4g}, {y} {row[y]:.4g}".removeprefix(": ")


def effect_mark(row: Row, has_ratios: bool) -> str:
    """'depth_scale=lns: ×0.61 (0.4 to 0.9), lower'; ends are those drawn."""
    value = f"{row['estimate']:.3g}{interval(row['lo'], row['hi'])}"
    return f"{row['setting']}: {'×' * has_ratios}{value}, {row['verdict']}"


def parallel_caption(n: int, objective: str) -> str:
    return (
        f"Each line: one of {counted(n, 'proposal')}, darker the better its {objective}; thick: on the front. Each "
        "axis has its values in order, in even steps."
    )


def lr_range(lrs: "pd.Series", changes: str = CHANGES_VARIANCE) -> str:
    """' lr is 0.003 to 0.006, which also changes residual variance.'; '' of one."""
    return f" lr is {lrs.min():g} to {lrs.max():g}{changes}." if lrs.nunique() > 1 else ""


def to_measure(metrics: Iterable[str]) -> str:
    """What gives these metrics by layer or pair: 'add to measures: causal or permutation'."""
    measures = {quantity_of_map(name).measure: None for name in metrics}
    return f"add to measures: {' or '.join(filter(None, measures))}"


def data_note(text: str) -> str:
    """How the data of the runs differ (`words.differences.data_text`), as a sentence."""
    return f" {sentence_of(text)}" if text else ""


def folders_note(folders: Sequence[str]) -> str:
    """' From 2 folders: a, b.'; '' of one."""
    return f" From {len(folders)} folders: {commas(map(escaped, folders))}." if len(folders) > 1 else ""


def by_setting_caption(points: "pd.DataFrame", finished: "pd.DataFrame", names_lr: bool) -> str:
    """`names_lr`: whether the legend has the lr of each setting, at the deepest depth."""
    text = f" lr is {points['lr'].min():g} throughout." if points["lr"].nunique() == 1 else ""
    if names_lr:
        changes = CHANGES_VARIANCE * ("residual_variance" in {*points["metric"]})
        text = f" lr: that of {points['n_layers'].max()} layers{changes}."
    others = sorted({*finished["n_layers"]} - {*points["n_layers"]})
    text += f" Not drawn: {commas(others)} layers." if others else ""
    return text + not_shown(finished["setting"].nunique() - points["setting"].nunique(), "further setting")


def matrices_caption(values: "pd.DataFrame", notes: str) -> str:
    """Of the means of `plots.matrices`."""
    depths = {*values["n_layers"]}
    of = f"The deepest, {max(depths)} layers" if len(depths) == 1 else "Each with its own layers"
    most = values["n_runs"].max()
    means = f"; mean over up to {most} runs each" if most > 1 else ""
    return f"{of}{means}. Grey: missing pairs.{trace_note({*values['metric']})}{notes}"


def trace_note(metrics: Collection[str]) -> str:
    return f" Causal trace: {BY_LAYER['trace_map'].formula}." if "trace_map" in metrics else ""


def models_caption(needed: str, n_models: int, n_without: int, n_texts: int) -> str:
    texts = f" Measured on {n_texts} texts, between which models do not compare." * (n_texts > 1)
    texts = f" Without {needed}: {n_without}.{texts}" if n_without else texts
    return (
        f"{counted(n_models, 'model')}. Height: {IN_RUNS[needed].formula}. Bars: the interval over sequences. "
        f"Hollow: weights below fp32.{texts}"
    )


def by_layer_caption(points: "pd.DataFrame", is_search: bool) -> str:
    shown = "the proposal with the lowest loss" if is_search else "the baseline, or the settings nearest to it"
    depths = {*points["n_layers"]}
    at = f"At {counted(max(depths), 'layer')}, by" if len(depths) == 1 else "By"  # the legend names several
    return f" {at} layer: {shown}.{lr_range(points['lr'])}"


def rates_marked(points: "pd.DataFrame") -> str:
    """What a ring marks."""
    is_tuned = points["is_tuned"]
    return "chosen by tuning" if is_tuned.all() else "chosen by tuning, else lowest" if is_tuned.any() else "lowest"


def rates_caption(points: "pd.DataFrame", n_beyond: int) -> str:
    n_lines = len(points[["panel", "setting"]].drop_duplicates())
    n_edge = int(points["role"].eq("edge").sum())
    text = f" {counted(n_lines, 'line')}, each over the seeds that all its points have. Ring: {rates_marked(points)}."
    text += f" Cross ({n_edge}): at the end of the grid; the best may lie beyond it." if n_edge else ""
    text += f" Triangle ({n_beyond}): above the axis." if n_beyond else ""
    return text + not_shown(int(points["mean"].isna().sum()), "value", " where a seed diverged")


def depth_caption(points: "pd.DataFrame", n_settings: int, n_single: int, n_diverged: int) -> str:
    """`points`: of all settings, of which `n_settings` are drawn."""
    names = set(points["panel"])
    text = f" {counted(n_settings, 'setting')}, at tuned values, if any."
    if "residual_variance_last" in names:
        text += lr_range(
            points["lr"], f"{CHANGES_VARIANCE}: points of unequal lr do not show the effect of a setting on it"
        )
    n_further = points["setting"].nunique() - n_settings
    text += not_shown(n_further, "further setting", ", of fewer depths or of a higher loss")
    return (
        text
        + not_shown(n_single, "setting", " of one depth")
        + not_shown(n_diverged, "configuration", " with a diverged seed")
    )


def isoflop_caption(found: Sequence["Crossover"], settings: Collection[str]) -> str:
    """With the verdicts of the settings drawn, a paragraph each."""
    n_further = len({one.setting for one in found}) - len(settings)
    text = " Wide grey line: the lower envelope. Verdicts: one fit over all depths, at the largest budget in common."
    verdicts = [escaped(f"{crossover_sentence(one)}.") for one in found if one.setting in settings]
    return "\n".join([text + not_shown(n_further, "further setting"), *verdicts])


def models_note(n: int) -> str:
    return f" {counted(n, 'model')} measured without a training configuration: see --figure layer_profile." if n else ""


def chain_caption(points: "pd.DataFrame", names: Sequence[str], n_diverged: int, degenerate: str) -> str:
    missing = [name for name in names if points[name].isna().all()]
    text = f"{counted(len(points), 'finished run')}, {n_diverged} diverged (not shown). ρ: Spearman's correlation, "
    text += f"from six settings on with its [95% interval over them].{degenerate}{lr_range(points['lr'])}"
    return text + (f" Not measured: {commas(missing)}." if missing else "")


def link_title(found: Sequence["Link"], n_shown: int, n_points: int, n_beyond: int = 0) -> str:
    """A line for each scope; `found` is empty where a score is degenerate."""
    said = [f"{each.scope}: {rho_text(each)}, n = {n_shown}" for each in found] or ["degenerate, so no evidence"]
    missing = [f"not shown: {n_points - n_shown} of {n_points} (NULL)"] if n_points > n_shown else []
    outside = [f"{counted(n_beyond, 'point')} beyond the axes"] if n_beyond else []
    return "\n".join([*said, *missing, *outside])


def front_caption(cells: "pd.DataFrame", noun: str, names: Sequence[str], has_bars: bool) -> str:
    spread = "one seed each" if cells["n_seeds"].max() == 1 else "mean over seeds" + ", 95% interval" * has_bars
    return (
        f"{counted(len(cells), noun)}, {spread}. Ringed: the {int(cells['on_front'].sum())} on the joint Pareto "
        f"front of {commas(names)}. Line: the Pareto front of the panel's two quantities, if it has several points."
    )


def slices_caption(n: int) -> str:
    return (
        f"Each dot: one of {counted(n, 'proposal')}, later ones darker. Selection bias: "
        "the best of many is optimistic. Run it again with new seeds."
    )


FACTS = {"val_loss": " nat/token", "residual_variance_last": "", "usefulness": ""}
"""Column of `runs` in the title of a layer profile -> its unit."""


def profile_title(profile: "LayerProfile", degenerate: Collection[str]) -> str:
    run = profile.run
    model = run.get("model")
    facts = [escaped(model) if isinstance(model, str) else f"run {run['run_id']}", f"{profile.n_layers} layers"]
    facts += [f"step {run['steps']:.0f}"] if run.get("origin") == WATCHED else []
    facts += [
        f"{name} {value:#.4g}{unit}{f' {DEGENERATE}' * (name in degenerate)}"
        for name, unit in FACTS.items()
        if isinstance(value := run.get(name), float) and math.isfinite(value)
    ]
    return "   ".join([*facts, *["diverged"] * (run.get("outcome") == "diverged")])


def profile_caption(profile: "LayerProfile", degenerate: Mapping[str, str], notes: str, n_hidden: int) -> str:
    """`degenerate`: score -> why it is; `notes`: on scores that are relative to the loss."""
    text = "Layer 0 is the embedding's output. Grey: missing (NULL, or a pair that was not sampled)."
    if profile.profiles["se"].notna().any():
        text += " Band: 95%, 1.96 standard errors over the random probes."
    text += trace_note(profile.matrices)
    scores: dict[str, list[str]] = {}
    for name, reasons in degenerate.items():
        scores.setdefault(reasons, []).append(f"{name}{f' {DEGENERATE}' * (name in FACTS)}")
    marked = commas(f"{commas(names)} ({reasons})" for reasons, names in scores.items())
    text += notes + (f" Degenerate, so no evidence: {marked}." if marked else "")
    return text + not_shown(n_hidden, "value", " at or below 0, on logarithmic axes")


def term_title(fitted: "FittedLaw", boot: "Bootstrap | None", term: "Term", points: "pd.DataFrame") -> str:
    """'depth: a_l = 1.02 (0.9 to 1.1)', and how many points a logarithmic axis cannot show."""
    exponent = fitted.parameters[f"a_{term.symbol}"]
    ends = (boot.intervals.get(exponent.name) if boot else None) or (exponent.lo, exponent.hi)
    n_hidden = int((points[f"{term.name}_rest"] <= 0).sum())
    hidden = f"\n{counted(n_hidden, 'point')} at or below 0 not shown" if n_hidden else ""
    without = " (fixed)" if exponent.name in fitted.law.fixed else " (interval unknown)"
    return f"{term.name}: a_{term.symbol} = {exponent.value:.3f}{interval(*ends, '.2f') or without}{hidden}"


def ladder_caption(n_hidden: int, drifting: Sequence[str], of: str = "compute") -> str:
    value = f"at each budget of {commas(drifting)}, whose drift is shown; else one value" if drifting else "one value"
    more = not_shown(n_hidden, "setting", " worth less")
    return (
        f" Above: grey, the law of the baseline with its 95% band. Below: the {of} that the baseline needs for the "
        f"same loss, over that of the setting, with its 95% interval: {value} for all budgets. "
        f"Pale: with a drift that is not shown.{more}"
    )


def law_caption(fitted: "FittedLaw", boot: "Bootstrap | None") -> str:
    kind = (
        f"95% band and intervals: bootstrap over {units_text(fitted)}" if boot else "95% intervals: from the Jacobian"
    )
    return (
        f"{law_text(fitted.law)}; E = {fitted.parameters['E'].value:.3f} nat/token. {fitted.n_points} points. {kind}."
    )


def effects_caption(has_lr: bool, n_diverged: int) -> str:
    text = (
        "Setting minus baseline, and 95% interval of seeds and of the choice of lr, where it was tuned. Filled: lower "
        "or higher (adjusted p below .05 over the settings at this depth). Hollow: not shown, or lr decides."
    )
    if has_lr:
        text += f" Right of the residual variance: tuned lr of baseline → setting{CHANGES_VARIANCE}."
    return text + not_shown(n_diverged, "diverged run")
