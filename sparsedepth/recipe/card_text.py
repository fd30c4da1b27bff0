"""A recipe as sentences, and as a file that `train` reads with its evidence on top."""

import textwrap
from pathlib import Path

import yaml

from sparsedepth.effects.sentences import basis_text, counted, effect_text
from sparsedepth.files import write_text
from sparsedepth.recipe.choose import Recipe, Tested


def rule(recipe: Recipe) -> str:
    """The recipe in one sentence."""
    where = "" if recipe.place == "inside" else f" ({recipe.place} from other depths)"
    if recipe.abstained:
        return f"At n_layers={recipe.depth}{where}: no recommendation: {recipe.reason}."
    changes = " and ".join(f"{one.contrast.setting} instead of {one.contrast.baseline}" for one in recipe.changes)
    better = f"better {recipe.objective} in these runs"
    return f"At n_layers={recipe.depth}{where}, matched in {recipe.matched}: use {changes}; associated with {better}."


def evidence(recipe: Recipe) -> list[str]:
    """The card, one line per statement: rule, domain, effects, what was not taken and why, stack, grade, runs."""
    lines = [rule(recipe), f"Objective: {recipe.objective}; matched: {recipe.matched}"]
    lines += [f"Domain: {', '.join(f'{name} {value}' for name, value in recipe.domain.items())}"]
    n_tested = sum(one.p_adjusted is not None for one in recipe.tested)
    for heading, wanted in (("Recommended", True), ("Not recommended", False)):
        lines += [f"{heading}: {_tested_text(one, n_tested)}" for one in recipe.tested if one.recommended == wanted]
    lines += [f"Together: {recipe.stack}", f"Diverged: {counted(recipe.n_diverged, 'run')} of {len(recipe.run_ids)}"]
    meaning = "in-sample, several seeds" if recipe.grade == "C" else "no replicates"
    lines.append(f"Grade {recipe.grade}: {meaning}. Grades A and B need a held-out test.")
    lines.append(f"Runs: {' '.join(recipe.run_ids) or 'none'}")
    return lines


def _tested_text(one: Tested, n_tested: int) -> str:
    contrast = one.contrast
    why = "" if one.recommended else f" ({one.reason})"
    p = "none" if one.p_adjusted is None else f"{max(one.p_adjusted, 1e-12):.2g}"
    kept = "" if one.shrunk is None else f"; shrunk {one.shrunk:+.3g}, reliability {one.reliability:.2f}"
    return (
        f"{contrast.setting} vs {contrast.baseline}{why}: {effect_text(contrast)}{kept}; "
        f"Holm p {p} over {counted(n_tested, 'setting')}. {basis_text(contrast)}"
    )


def to_yaml(recipe: Recipe) -> str:
    """The RunConfig as YAML, its evidence as comments above it. The seed is left to the reader.

    Raises ValueError for a recipe with no run to start from.
    """
    if recipe.config is None:
        raise ValueError(f"there is no configuration to write: {recipe.reason}")
    comments = [
        line
        for statement in evidence(recipe)
        # split() also ends lines at U+0085 and U+2028, which YAML takes for line breaks: a comment stays one.
        for line in textwrap.wrap(" ".join(statement.split()), 110, subsequent_indent="  ", break_on_hyphens=False)
    ]
    values = recipe.config.model_dump(mode="json", exclude={"seed"})
    first = {"n_layers", *(name for one in recipe.changes for name in one.fields)}
    values = dict(sorted(values.items(), key=lambda item: item[0] not in first))
    return "".join(f"# {line}\n" for line in comments) + yaml.safe_dump(values, sort_keys=False)


def write(recipe: Recipe, path: Path) -> None:
    """Write `to_yaml` to a file, whole or not at all."""
    write_text(path, to_yaml(recipe))
