"""Fill a recipe card from the rows that the recipe was derived from."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from sparsedepth.config.role import roles
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.contrast import contrasts, interactions
from sparsedepth.effects.knobs import Knob, Plain, labels, plain, tuned_fields
from sparsedepth.effects.pairs import BASES, unit_of
from sparsedepth.effects.sentences import counted, effect_text, interaction_sentence
from sparsedepth.files import digest
from sparsedepth.recipe.card import (
    Card,
    Change,
    Domain,
    Effect,
    HeldOut,
    Interactions,
    OnBases,
    Outcome,
    Provenance,
    Rule,
    Values,
    grade_of,
)
from sparsedepth.recipe.card_text import rule
from sparsedepth.recipe.choose import Recipe, Tested
from sparsedepth.recipe.holdout import Holdout, sentences
from sparsedepth.recipe.literature import compare_effects
from sparsedepth.recipe.mechanism import mechanism_of
from sparsedepth.store.find import read_file
from sparsedepth.store.tuning import standing

DOMAIN = ("beta1", "beta2", "weight_decay_on", "grad_clip", "warmup_frac", "vocab_size", "device")
"""Fields that the recipe's own domain leaves to the card."""


def fill(runs: pd.DataFrame, recipe: Recipe, holdout: Holdout | None = None, folders: Sequence[Path] = ()) -> Card:
    """The card of a recipe; `runs` are all rows of the store, tuning's rejected values included."""
    known = standing(runs)
    used = known[known["run_id"].isin(recipe.run_ids)]
    changes = [one.contrast.setting for one in recipe.changes]
    same = holdout is not None and list(holdout.changes) == changes
    depth_outcome: Outcome | None = None
    if holdout is not None and changes:
        depth_outcome = holdout.outcome if same else "not confirmed"
    mechanism = mechanism_of(used, recipe, (depth_outcome,))
    effects = [_effect(one, recipe) for one in recipe.tested]
    said = sentences(holdout) if holdout else []
    if holdout and not same:
        advice = " and ".join(holdout.changes) or "no change"
        said.append(f"All runs together advise otherwise than the shallower ones did ({advice}): not confirmed")
    return Card(
        rule=_rule(recipe),
        domain=_domain(used, recipe),
        effects=effects,
        matched=[_on_bases(used, one, recipe) for one in recipe.tested],
        learning_rate=_learning_rate(runs, used, recipe),
        tune=_tune(runs),
        mechanism=mechanism,
        confounds=[*_confounds(recipe), *_tuned_apart(used)],
        held_out=HeldOut(
            depth_test=_plain(holdout) if holdout else None,
            depth_outcome=depth_outcome,
            depth_sentences=said,
            verification=None,
        ),
        interactions=Interactions(stack=recipe.stack, leave_one_out=[], with_depth=_with_depth(known, recipe)),
        negative=_negative(used, recipe),
        literature=compare_effects(effects, recipe.objective),
        provenance=_provenance(runs, recipe, folders),
        grade=grade_of(recipe.grade, mechanism.supported, depth_outcome, None),
    )


def plain_config(config: RunConfig | None) -> Values | None:
    return None if config is None else config.model_dump(mode="json", exclude={"seed"}, exclude_none=True)


def _plain(holdout: Holdout) -> Values:
    values = holdout.__dict__ | {"predictions": [one.__dict__ for one in holdout.predictions]}
    return json.loads(json.dumps(values | {"decision_accuracy": holdout.decision_accuracy}))


def _values(settings: Mapping[str, Plain]) -> Values:
    return {name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()}


def _rule(recipe: Recipe) -> Rule:
    changes = [
        Change(
            knob=one.knob.name,
            setting=one.contrast.setting,
            baseline=one.contrast.baseline,
            values=_values(one.knob.settings[one.contrast.setting]),
            baseline_values=_values(one.knob.settings[one.contrast.baseline]),
        )
        for one in recipe.changes
    ]
    spread = "unknown (no interval)" if recipe.spread is None else f"{recipe.spread:.3g}"
    return Rule(
        sentence=rule(recipe),
        depth=recipe.depth,
        objective=recipe.objective,
        unit=unit_of(recipe.objective),
        matched=recipe.matched,
        changes=changes,
        abstained=recipe.reason,
        baseline=plain_config(recipe.baseline),
        config=plain_config(recipe.config),
        expected_gain=recipe.expected_gain,
        shrinkage=f"empirical Bayes towards 0, by each setting's reliability; spread of true effects tau = {spread}",
    )


def _domain(used: pd.DataFrame, recipe: Recipe) -> Domain:
    values = dict(recipe.domain)
    if len(used):
        ratio = (used["tokens_trained"].astype(float) / used["params_total"].astype(float)).dropna()
        if len(ratio):
            values["tokens per parameter"] = f"{ratio.min():.3g} to {ratio.max():.3g}"
        values["optimizer"] = "AdamW, " + ", ".join(
            f"{name} {', '.join(sorted({str(plain(one)) for one in used[name]}))}" for name in DOMAIN if name in used
        )
    return Domain(place=recipe.place, depths=sorted(set(map(int, used["n_layers"]))), values=values)


def _effect(one: Tested, recipe: Recipe) -> Effect:
    contrast = one.contrast
    return Effect(
        knob=one.knob.name,
        setting=contrast.setting,
        baseline=contrast.baseline,
        values=_values(one.knob.settings[contrast.setting]),
        baseline_values=_values(one.knob.settings[contrast.baseline]),
        mean=contrast.effect.mean,
        lo=contrast.effect.lo,
        hi=contrast.effect.hi,
        p_holm=one.p_adjusted,
        n_pairs=contrast.effect.n,
        n_seeds=contrast.n_seeds,
        n_diverged=contrast.n_diverged,
        noise=contrast.noise,
        floor=contrast.floor,
        verdict=contrast.verdict,
        shrunk=one.shrunk,
        reliability=one.reliability,
        recommended=one.recommended,
        reason=one.reason,
        n_heads=recipe.baseline.n_heads if recipe.baseline else None,
    )


def _on_bases(used: pd.DataFrame, one: Tested, recipe: Recipe) -> OnBases:
    """The setting's effect among pairs that agree in each basis, at the recipe's depth (over all, where predicted)."""
    equal: dict[str, Values | None] = {}
    for basis in BASES:
        found = contrasts(used, one.knob, recipe.objective, basis)
        mine = [c for c in found if c.setting == one.contrast.setting]
        at = [c for c in mine if c.n_layers == recipe.depth] or mine[-1:]
        effect = at[0].effect if at else None
        equal[basis] = {"mean": effect.mean, "lo": effect.lo, "hi": effect.hi, "n": effect.n} if effect else None
    return OnBases(
        setting=one.contrast.setting,
        equal=equal,
        ratios={name: list(ratio) if ratio else None for name, ratio in one.contrast.ratios.items()},
        wall_clock=_wall_clock(used[used["run_id"].isin(one.contrast.run_ids)], one.knob, one.contrast.setting),
    )


def _wall_clock(runs: pd.DataFrame, knob: Knob, setting: str) -> float | None:
    """Mean training time at the setting / at the baseline; None where a run does not say."""
    if "training_seconds" not in runs.columns or not len(runs):
        return None
    seconds, which = pd.to_numeric(runs["training_seconds"], errors="coerce"), labels(runs, knob)
    ratio = float(seconds[which == setting].mean() / seconds[which == knob.baseline].mean())
    return None if seconds.isna().any() or not ratio > 0 else ratio


def _tune(runs: pd.DataFrame) -> dict[str, list[float]]:
    """Tuned field -> the values tried."""
    if "tuned_fields" not in runs.columns:
        return {}
    names = sorted({name for text in runs["tuned_fields"].dropna() for name in text.split(",")})
    return {name: sorted({float(value) for value in runs.loc[runs["tuned_fields"].notna(), name]}) for name in names}


def _learning_rate(runs: pd.DataFrame, used: pd.DataFrame, recipe: Recipe) -> list[str]:
    """The values tried for each configuration, where tuned; and AdamW's time scale where weight decay varies."""
    lines = []
    tried = _tune(runs)
    for name, values in tried.items():
        at_edge = int((used["tuning"] == "edge").sum())
        best = ", ".join(f"{value:g}" for value in sorted(set(used[name].dropna())))
        lines.append(
            f"{name} tuned for each configuration over {', '.join(f'{value:g}' for value in values)}; best: {best}; "
            f"{counted(at_edge, 'run')} of {len(used)} at the edge of the values tried"
        )
    if not tried:
        rates = ", ".join(f"{value:g}" for value in sorted(set(used["lr"].dropna()))) or "unknown"
        lines.append(f"lr was not tuned for each configuration (lr {rates}): a setting may want another")
    for rate, decay in sorted({(float(r), float(d)) for r, d in zip(used["lr"], used["weight_decay"], strict=True)}):
        scale = f"{1 / (rate * decay):.4g} steps" if decay else "infinite"
        lines.append(f"lr {rate:g}, weight_decay {decay:g}: AdamW time scale 1/(lr weight_decay) = {scale}")
    return lines


def _confounds(recipe: Recipe) -> list[str]:
    """Other explanations of the settings tested, each with what is known of it here."""
    tested = {one.knob.name for one in recipe.tested}
    lines = [role.confound for name, role in roles(RunConfig).items() if role.confound and name in tested]
    lines += [
        f"{' and '.join(one.fields)} change only together: no effect can be ascribed to one of them."
        for one in recipe.tested
        if not one.knob.is_pure
    ]
    lines.append("Residual variance falls under a mere rescaling of the stream: LNS and the inits are the control.")
    if recipe.objective == "usefulness" and recipe.depth:
        lines.append(
            f"usefulness moves in steps of 1/n_layers = {1 / recipe.depth:.4g}; usefulness_loss_increase does not"
        )
    return list(dict.fromkeys(lines))


def _tuned_apart(used: pd.DataFrame) -> list[str]:
    """What it means that each configuration has its own best value of a tuned field, where these differ."""
    lines = []
    for name in sorted(tuned_fields(used)):
        values = [f"{value:g}" for value in sorted(set(used[name]))]
        if len(values) > 1:
            lines.append(
                f"{name} was tuned for each configuration, to {', '.join(values)}: an effect holds between best values "
                f"and includes what moving {name} does, above all to residual variance."
            )
    return lines


def _with_depth(known: pd.DataFrame, recipe: Recipe) -> list[str]:
    knobs = {one.knob.name: one.knob for one in recipe.tested}
    return [interaction_sentence(one) for knob in knobs.values() for one in interactions(known, knob, recipe.objective)]


def _negative(used: pd.DataFrame, recipe: Recipe) -> list[str]:
    """What was not taken, why, and what diverged."""
    lines = [
        f"{one.contrast.setting} vs {one.contrast.baseline}: {one.reason}; {effect_text(one.contrast)}"
        for one in recipe.tested
        if not one.recommended
    ]
    diverged = used[used["outcome"] == "diverged"]
    lines += [f"run {row.run_id} diverged: {row.diverged_cause or 'cause unknown'}" for row in diverged.itertuples()]
    return lines


def _provenance(runs: pd.DataFrame, recipe: Recipe, folders: Sequence[Path]) -> Provenance:
    """The runs that were read, their manifests, and the hours of every run of the store, tuning included."""
    used = standing(runs)
    names = [str(folder) for folder in folders]
    manifests = [_manifest(Path(folder)) for folder in used["folder"]] if "folder" in used.columns else []
    contents = [content for content in manifests if content is not None]
    whole = bool(contents) and len(contents) == len(manifests)
    facts = [_facts(content) for content in contents] if whole else []
    hours: dict[str, float] = {}
    if {"device", "seconds"} <= {*runs.columns}:
        seconds = pd.to_numeric(runs["seconds"], errors="coerce").fillna(0.0)
        hours = {str(name): float(sum_) / 3600 for name, sum_ in seconds.groupby(runs["device"]).sum().items()}
    asked = f"--depth {recipe.depth} --objective {recipe.objective} --matched {recipe.matched}"
    shown = " ".join(names) or "DIR"
    return Provenance(
        folders=names,
        run_ids=sorted(used["run_id"]),
        seeds=sorted(set(map(int, used["seed"].dropna()))),
        manifests=digest(sorted(hashlib.sha256(content).hexdigest() for content in contents)) if whole else None,
        code=sorted({fact["code"] for fact in facts if fact["code"]}),
        kernels=sorted({fact["kernels"] for fact in facts if fact["kernels"]}),
        data=sorted({fact["data"] for fact in facts if fact["data"]}),
        hours=hours,
        command=f"sparsedepth recipe {shown} {asked}",
        figures=f"sparsedepth plot {shown} --figure all -o figures",
    )


def _manifest(folder: Path) -> bytes | None:
    try:
        return read_file(folder, "manifest.json")
    except FileNotFoundError:
        return None


def _facts(content: bytes) -> dict[str, Any]:
    """Code version, kernels and data of one run, as its manifest names them."""
    manifest = json.loads(content)
    code, kernels = manifest.get("code") or {}, manifest.get("kernels") or {}
    changed = ", changed" if code.get("changed") else ""
    return {
        "code": f"{code.get('version')} {code.get('commit') or ''}{changed}".strip() if code else "",
        "kernels": ", ".join(f"{name} {value}" for name, value in kernels.items() if value),
        "data": manifest.get("data_hash"),
    }
