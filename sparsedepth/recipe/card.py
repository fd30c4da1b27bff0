"""The recipe card: recommendation, effects, tests and provenance in one record, stored as JSON with unrounded numbers.

Every text about a recipe, on the terminal, in Markdown, above its YAML and in the report, is written from it
(`words.recipe`). Its effects are rows of the frame `effects`."""

from pathlib import Path
from statistics import fmean
from typing import Annotated, Literal

from pydantic import Field

from sparsedepth import quantities
from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.section import Section
from sparsedepth.effects.effect import Effect
from sparsedepth.files import parse_json, write_json
from sparsedepth.quantities.quantity import Named
from sparsedepth.store.query_result import QueryResult
from sparsedepth.words.effects import fitted_text, size_text
from sparsedepth.words.recipe import sentence
from sparsedepth.words.scaling import multiplier_text
from sparsedepth.words.values import number_text

SUFFIX = ".card.json"
MAX_BYTES = 16_000_000

Place = Literal["inside", "interpolation", "extrapolation"]
Comparison = Literal["better", "worse", "not shown"]
Outcome = Literal["confirmed", "refuted", "not confirmed", "not tested"]
Need = Literal["needed", "harmful", "not shown to be needed"]


LISTS: dict[Comparison, str] = {"better": "do", "worse": "don't", "not shown": "not shown"}
"""Comparison with the baseline -> the list that a setting is on, unless it is refused."""


def comparison_of(effect: Effect | None) -> Comparison:
    """Whether a setting is better than its baseline, by the verdict on an objective."""
    if effect is None or not effect.is_shown:
        return "not shown"
    return "better" if (effect.verdict == "higher") == (quantities.sign(effect.outcome) > 0) else "worse"


class Candidate(Section):
    """One setting on top of the baseline: its effect, and why it does not count although it is better or worse."""

    effect: Effect
    values: Named
    """RunConfig field -> value at the setting, where it differs"""
    baseline_values: Named
    compute: tuple[float, float | None, float | None] | None = None
    """compute of the baseline at the same loss over its own, lo, hi; with three budgets"""
    is_combination: bool = False
    """of two settings that were also run one by one"""
    recommended: bool = False
    refused: str = ""
    """why a better setting is not in the recipe, or a worse one does not count"""

    @property
    def setting(self) -> str:
        return self.effect.setting

    @property
    def comparison(self) -> Comparison:
        return comparison_of(self.effect)


class Recipe(Section):
    depth: int | None
    objective: str
    unit: str
    """of a difference; 'ln ratio': of natural logarithms"""
    matched: str
    """the cost of which a setting may spend no more than the baseline"""
    place: Place = "inside"
    """where the depth lies among those that were run"""
    shown_at: tuple[int, ...] = ()
    """the depths of the effects; the first is the nearest"""
    baseline_text: str = ""
    """the baseline's values of the fields that settings change"""
    baseline_seeds: int | None = None
    baseline: RunConfig | None = None
    """with any seed; None if it was not run"""
    config: RunConfig | None = None
    """with any seed; the baseline without a change"""
    candidates: tuple[Candidate, ...] = ()
    effect: Effect | None = None
    """of the whole recipe against the baseline"""
    others: tuple[Effect, ...] = ()
    """effects beside another setting that differ from those alone"""
    scales: tuple[Effect, ...] = ()
    """of the recipe at other widths or budgets"""
    untested: tuple[str, str] | None = None
    """two settings, each better alone, that were not run together"""
    abstained: str = ""
    """why nothing is recommended; empty if something is"""
    weakness: str = ""
    """why these models are no evidence about depth; empty if they are"""
    left_out: str = ""
    """runs that are not compared: other budgets, another way of scoring"""
    unknown: str = ""
    """source of third-party runs, and what is unknown about them; empty without any"""
    defaulted: tuple[str, ...] = ()
    """fields that no third-party run states; `config` has RunConfig's defaults"""
    cost_of_depth: str = ""
    """that the depth is not worth its cost, where that is shown"""
    tried: dict[str, list[float]] = {}
    """tuned field -> values tried"""
    shared_lr: float | None = None
    """of all runs, where it was not tuned"""
    seen_on: str
    """data, sizes and devices of the runs"""
    run_ids: tuple[str, ...]

    @property
    def is_compared(self) -> bool:
        """Whether any setting has an interval."""
        return any(candidate.effect.lo is not None for candidate in self.candidates)

    @property
    def unseen(self) -> list[float]:
        """The smallest effects that would have been seen, of settings that are not shown to be better or worse."""
        settings = [candidate for candidate in self.candidates if not candidate.is_combination]
        return sorted(filter(None, (c.effect.detectable for c in settings if c.comparison == "not shown")))

    @property
    def changes(self) -> tuple[Candidate, ...]:
        return tuple(candidate for candidate in self.candidates if candidate.recommended)


class Prediction(Section):
    """One setting at the held-out depth: its effect at the nearest shallower depth, and there."""

    setting: str
    predicted: Effect
    measured: Effect | None


class Holdout(Section):
    """The recipe of the shallower depths, tested at a depth that it did not see."""

    depth: int
    fitted_on: tuple[int, ...]
    changes: tuple[str, ...]
    """recommended from the shallower depths"""
    predictions: tuple[Prediction, ...]
    gain: Effect | None
    """of these changes at the held-out depth"""
    outcome: Outcome

    @property
    def errors(self) -> tuple[float, float] | None:
        """The mean error of the predictions, and of predicting no effect."""
        pairs = [(p.predicted.estimate, p.measured.estimate) for p in self.predictions if p.measured]
        known = [(own, there) for own, there in pairs if own is not None and there is not None]
        return (fmean(abs(a - b) for a, b in known), fmean(abs(b) for _, b in known)) if known else None


class Ingredient(Section):
    """The recipe without one change against the recipe, on the fresh seeds."""

    left_out: str
    effect: Effect | None
    verdict: Need


class Verification(Section):
    """The test on fresh seeds: the recipe against the baseline, and against itself with each change left out."""

    seeds: tuple[int, ...]
    run_ids: tuple[str, ...]
    gain: Effect | None
    """p_adjusted: corrected for earlier verifications"""
    outcome: Outcome
    ingredients: tuple[Ingredient, ...]


class Test(Section):
    __test__ = False
    name: str
    outcome: Literal["passed", "failed", "not run"]
    text: str


class Provenance(Section):
    folders: list[str]
    run_ids: list[str]
    seeds: list[int]
    manifests: str | None
    """digest of the manifests' checksums; None where one is missing"""
    code: list[str]
    kernels: list[str]
    data: list[str]
    hours: dict[str, float]
    """device -> wall-clock hours, tuning included; a trunk counts in each of its branches"""
    node_hours: float | None = None
    """on a cluster, tuning and lost starts included"""
    command: str


class Card(Section):
    version: Annotated[int, Field(ge=1, description="rises with every verification that is added")] = 1
    recipe: Recipe
    holdout: Holdout | None = None
    verification: Verification | None = None
    tests: tuple[Test, ...] = ()
    """of the recipe; none where nothing is recommended"""
    provenance: Provenance

    @property
    def sentence(self) -> str:
        return sentence(self)

    def __repr__(self) -> str:
        return self.sentence

    __str__ = __repr__


def recipe_table(card: Card, most: int | None = None) -> QueryResult:
    """The settings tried, a row each: those to do, not to do, and not shown; combinations last in their list. Of `most`
    rows each list has one at least, and the worth in compute is without its interval, which would wrap."""
    names = (
        "list",
        "fitted",
        "effect",
        "lo",
        "hi",
        "detectable",
        "seeds",
        "diverged",
        next(iter(card.recipe.tried), "lr"),
        "flops",
        "params",
        "compute",
    )
    order = [*LISTS]
    found = sorted(
        card.recipe.candidates,
        key=lambda c: (order.index(c.comparison), c.is_combination, -abs(c.effect.estimate or 0.0)),
    )
    first = {candidate.comparison: candidate for candidate in reversed(found)}
    kept = {c.setting for c in sorted(found, key=lambda c: c is not first[c.comparison])[:most]}
    rows = tuple(_row(candidate, most is not None) for candidate in found if candidate.setting in kept)
    return QueryResult(columns=(*names, "setting"), rows=rows)


def _row(candidate: Candidate, is_short: bool) -> tuple:
    """The cells of a candidate in the card's table; `is_short`: without the interval of its compute multiplier."""
    effect, is_open = candidate.effect, candidate.comparison == "not shown"
    sizes = [(effect.estimate, "+"), (effect.lo, "+"), (effect.hi, "+"), (effect.detectable if is_open else None, "")]
    texts = [None if size is None else size_text(size, effect.unit, sign) for size, sign in sizes]
    listed = "left out" if candidate.refused else LISTS[candidate.comparison]
    costs = [None if cost is None else f"x{cost:.3g}" for cost in (effect.flops, effect.params_total)]
    worth = None
    if candidate.compute:
        worth = f"x{multiplier_text(candidate.compute[0], *((None, None) if is_short else candidate.compute[1:]))}"
    return (
        listed if effect.lo is not None else "no interval", fitted_text(effect.fitted, effect.unit), *texts,
        effect.seeds, effect.diverged or None, number_text(effect.lr), *costs, worth, candidate.setting,
    )  # fmt: skip


def card_path(path: Path) -> Path:
    """The path of a card's JSON, from that of the recipe's YAML or of any of the card's files."""
    name = path.name
    for suffix in (SUFFIX, ".card.md", ".yaml", ".yml"):
        if name.endswith(suffix):
            return path.with_name(name.removesuffix(suffix) + SUFFIX)
    return path.with_name(name + SUFFIX)


def read_card(path: Path) -> Card:
    """A card, from the path of its JSON or of the recipe's YAML next to it. Raises ValueError for anything else."""
    path = card_path(path)
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError(f"a card may have {MAX_BYTES:,} bytes")
        values = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; write one with `sparsedepth recipe DIR -o FILE`") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} is no recipe card: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is no recipe card: it holds a {type(values).__name__}")
    return build(Card, values, str(path))


def write_card(path: Path, card: Card) -> Path:
    """Write the JSON next to `path`; returns its path."""
    path = card_path(path)
    write_json(path, card.model_dump(mode="json", by_alias=True))
    return path
