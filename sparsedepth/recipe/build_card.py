"""Build a recipe's card from the rows that it was derived from, with its provenance (runs, manifests, code, kernels,
data, cost, command), and with the verification of its trial: the verified card that `recipe verify` wrote into a folder
next to the recipe's results, if it has the same claim from the same runs."""

import hashlib
import json
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas as pd

from sparsedepth.effects.cells import LOSSES, Cells, cells_of
from sparsedepth.files import digest, parse_json
from sparsedepth.recipe.card import MAX_BYTES, SUFFIX, Candidate, Card, Provenance, Recipe, read_card
from sparsedepth.recipe.choose import Evidence, derive
from sparsedepth.recipe.verify import hold_out, tests_of, with_verification
from sparsedepth.scaling.crossover import baselines_at_budgets
from sparsedepth.scaling.speedup import Worths
from sparsedepth.store.packs import read_file
from sparsedepth.store.setting import BUDGET
from sparsedepth.words.plain_text import in_shell
from sparsedepth.words.recipe import claim_of
from sparsedepth.words.scaling import not_worth

FACTS = {"code": "code", "kernels": "kernels", "data": "data hash"}
"""Field of Provenance -> fact of a manifest."""


def derive_card(
    runs: pd.DataFrame,
    depth: int | None = None,
    objective: str = "val_loss",
    matched: str | None = None,
    holdout_depth: int | None = None,
    folders: Sequence[Path] = (),
    evidence: Evidence | None = None,
    compute: Worths | None = None,
    told: str = "",
) -> Card:
    """The recipe of the rows of `runs` as a card; tested at `holdout_depth`, and with the verification found next to
    the folders. `compute`: what settings are worth (`scaling.speedup`); `told`: on runs that are pending. Raises as
    `derive` and `hold_out`."""
    found = evidence or Evidence(cells_of(runs, objective))
    recipe = derive(runs, depth, objective, matched, found)
    left_out = "; ".join(filter(None, [recipe.left_out, told]))
    recipe = recipe.model_copy(update={"left_out": left_out, "cost_of_depth": _cost_of_depth(found.cells, recipe)})
    if compute and recipe.candidates:
        recipe = recipe.model_copy(update={"candidates": tuple(_with_compute(recipe, compute))})
    holdout = None if holdout_depth is None else hold_out(found, holdout_depth, recipe)
    used = found.results[found.results["run_id"].isin(recipe.run_ids)]
    provenance = provenance_of(runs, used, recipe, folders)
    tests = tests_of(recipe, holdout, None)
    return with_trial(Card(recipe=recipe, holdout=holdout, tests=tests, provenance=provenance), folders)


def _cost_of_depth(cells: Cells, recipe: Recipe) -> str:
    """Whether the baseline of the depth is shown not to be worth its cost; '' where it is not, or was not run."""
    if cells.outcome not in LOSSES or recipe.place != "inside":
        return ""
    judged = baselines_at_budgets(cells)
    return "".join(not_worth(one) for one in judged if one.n_layers == recipe.depth and one.verdict == "not worth it")


def _with_compute(recipe: Recipe, compute: Worths) -> Iterator[Candidate]:
    assert recipe.baseline is not None
    for candidate in recipe.candidates:
        tokens = candidate.values.get(BUDGET, recipe.baseline.train_tokens)
        worth = compute.get((recipe.shown_at[0], candidate.setting, tokens))
        yield candidate.model_copy(update={"compute": worth})


def provenance_of(runs: pd.DataFrame, used: pd.DataFrame, recipe: Recipe, folders: Sequence[Path]) -> Provenance:
    """The runs used, facts from their manifests, and the hours of all runs of the store, tuning included."""
    names = [str(folder) for folder in folders]
    manifests = [manifest_of(folder) for folder in used.get("folder", ())]
    contents = [content for content in manifests if content is not None]
    is_complete = bool(contents) and len(contents) == len(manifests)
    facts = [manifest_facts(content) for content in contents if is_complete]
    cost = runs.reindex(columns=["device", "seconds", "node_hours"])
    seconds = pd.to_numeric(cost["seconds"], errors="coerce").dropna().groupby(cost["device"]).sum()
    on_nodes = cost["node_hours"].dropna()
    depth = f"--depth {recipe.depth} " if recipe.depth else ""
    options = f"{depth}--objective {recipe.objective} --matched {recipe.matched}"
    paths = in_shell(*names) or "DIR"
    return Provenance(
        folders=names,
        run_ids=sorted(used["run_id"]),
        seeds=sorted(set(map(int, runs["seed"].dropna()))),
        manifests=digest(sorted(hashlib.sha256(content).hexdigest() for content in contents)) if is_complete else None,
        **{field: sorted({fact[name] for fact in facts if name in fact}) for field, name in FACTS.items()},
        hours={str(name): float(total) / 3600 for name, total in seconds.items()},
        node_hours=float(sum(on_nodes)) if len(on_nodes) else None,
        command=f"sparsedepth recipe {paths} {options}",
    )


def manifest_of(folder: object) -> bytes | None:
    """The manifest of a run's folder, packed or not; None where there is none."""
    try:
        return read_file(Path(str(folder)), "manifest.json")
    except OSError:
        return None


def manifest_facts(content: bytes | None) -> dict[str, str]:
    """Code version, kernels, data hash and packages, as far as a run's manifest has them."""
    try:
        manifest = parse_json(content or b"null")
    except ValueError:
        return {}
    if not isinstance(manifest, dict):
        return {}
    code, kernels, packages, data = (
        part if isinstance(part := manifest.get(name), dict) else {} for name in ("code", "kernels", "packages", "data")
    )
    commit = f", commit {code['commit']}" if code.get("commit") else ""
    facts = {
        "code": f"sparsedepth {code.get('version')}{commit}" if code else "",
        "kernels": ", ".join(f"{name} {value}" for name, value in kernels.items() if isinstance(value, str) and value),
        "data hash": data.get("data_hash") or manifest.get("data_hash"),
        "packages": ", ".join(f"{name} {value}" for name, value in packages.items() if value),
    }
    if commit and code.get("changed"):
        facts["code"] += " with uncommitted changes"
    return {name: value for name, value in facts.items() if isinstance(value, str) and value}


def with_trial(card: Card, folders: Sequence[Path]) -> Card:
    """The card with the verification found next to its results, if any: the latest; of several of one card, which share
    their first seeds, that with the most."""
    claim = claim_of(card.recipe), card.recipe.run_ids
    trials = [t for _, t in verified_cards(folders) if (claim_of(t.recipe), t.recipe.run_ids) == claim]
    tests = [(trial.version, test) for trial in trials if (test := trial.verification)]
    if not tests:
        return card
    version, latest = max(tests, key=lambda test: (test[0], len(test[1].seeds)))
    return with_verification(card, latest).model_copy(update={"version": version})


def trials_of(folders: Sequence[Path]) -> list[tuple[Path, Card]]:
    """(folder, verified card) next to results folders, of recipes derived from one of them (by its name)."""
    names = {folder.resolve().name for folder in folders}
    return [(path, card) for path, card in verified_cards(folders) if names & _sources(card)]


def verified_cards(folders: Sequence[Path]) -> Iterator[tuple[Path, Card]]:
    """Each folder next to these with a verified card in it, by name. A card that this version cannot read is skipped
    with a warning; `report --card` gives the reason."""
    for parent in sorted({folder.resolve().parent for folder in folders}):
        for path in sorted(parent.glob(f"*/*{SUFFIX}")):
            try:
                if path.stat().st_size > MAX_BYTES or not json.loads(path.read_text())["verification"]:
                    continue
            except (OSError, ValueError, KeyError, TypeError, RecursionError):
                continue
            try:
                card = read_card(path)
            except ValueError:
                again = "`sparsedepth recipe verify` writes it anew"
                warnings.warn(f"{path} is not a card of this version and is left out; {again}", stacklevel=2)
                continue
            if path.parent.name not in _sources(card):  # else it is the recipe's own card
                yield path.parent, card


def _sources(card: Card) -> set[str]:
    """The names of the folders from which a recipe was derived."""
    return {Path(name).name for name in card.provenance.folders}
