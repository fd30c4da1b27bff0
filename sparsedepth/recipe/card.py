"""The recipe card: claim, domain, uncertainty and evidence in one record, stored as JSON with unrounded numbers.

Every text about a recipe, on the terminal, in Markdown, above its YAML and in the report, is written from it
(`card_text`, `card.md.j2`). The twelve sections of the Markdown page and their fields: 1 rule, 2 domain and 3 effects
`recipe`; 4 `matched`; 5 `learning_rate`; 6 `mechanism`; 7 `confounds`; 8 `held_out`; 9 the recipe's stack and
`depth_slopes`; 10 the refused candidates and `diverged`; 11 `provenance`; 12 `grade`.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.section import Section
from sparsedepth.effects.causal_evidence import InterventionEffect, LinkEvidence
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.depth_slope import SlopeContrast
from sparsedepth.files import write_json

SUFFIX = ".card.json"
MAX_BYTES = 16_000_000

Place = Literal["inside", "interpolation", "extrapolation"]
Comparison = Literal["better", "worse", "not distinguishable", "not compared"]
Outcome = Literal["confirmed", "refuted", "not confirmed", "not tested"]
Need = Literal["needed", "harmful", "not distinguishable", "not compared"]
Grade = Literal["A", "B", "C", "D"]
MeasuredPart = Literal["recommended", "baseline", "best measured"]
RecipeWord = Literal["in-sample", "predicted", "intervention-backed"]
Values = dict[str, Any]


class Candidate(Section):
    """One setting that could be part of the recipe: its effect, and the reason if it is not."""

    contrast: Annotated[Contrast, Field(description="at the card's depth, with Holm's p over all that were tested")]
    values: Annotated[Values, Field(description="RunConfig field -> value at the setting")]
    baseline_values: Values
    shrunk: Annotated[float | None, Field(description="effect times reliability; None without an interval")]
    reliability: Annotated[float | None, Field(description="shrunk effect / effect")]
    refused: Annotated[str, Field(description="why it is no part of the recipe; empty if it is")]

    @property
    def recommended(self) -> bool:
        return not self.refused


class Stack(Section):
    """Two or more changes together, against the baseline and against the best of them alone."""

    best: str
    against_baseline: Contrast | None
    against_best: Contrast | None


class Domain(Section):
    """The values and ranges that the evidence covers."""

    depths: tuple[int, ...]
    ranges: dict[str, tuple[int | float, int | float]]
    values: dict[str, tuple[str, ...]]

    @property
    def is_one_scale(self) -> bool:
        """Whether these runs have one width and one budget, and so no evidence across scale."""
        ends = (self.ranges.get(name, (0, 0)) for name in ("d_model", "tokens_trained"))
        return all(low == high for low, high in ends)


class Recipe(Section):
    """The recommendation at one depth."""

    depth: int | None
    objective: str
    unit: str
    matched: Annotated[str, Field(description="the basis of which a setting may spend no more than its baseline")]
    place: Annotated[Place, Field(description="where the depth lies among those that were run")]
    abstained: Annotated[str, Field(description="why nothing is recommended; empty if something is")] = ""
    baseline: Annotated[RunConfig | None, Field(description="with any seed")] = None
    config: Annotated[RunConfig | None, Field(description="with any seed; the baseline where it abstains")] = None
    candidates: tuple[Candidate, ...] = ()
    others: Annotated[
        tuple[str, ...], Field(description="effects beside other settings, and of settings together, as text")
    ] = ()
    spread: Annotated[float | None, Field(description="tau: how far true effects lie from 0")] = None
    stack: Annotated[Stack | None, Field(description="None with fewer than two changes to stack")] = None
    domain: Domain
    run_ids: tuple[str, ...]
    n_diverged: int
    weakness: Annotated[str, Field(description="why these models are no evidence about depth; empty if they are")] = ""
    unknown: Annotated[
        str, Field(description="source of third-party runs, and what is unknown about them; empty without any")
    ] = ""
    defaulted: Annotated[
        tuple[str, ...], Field(description="fields that no third-party run states; `config` has RunConfig's defaults")
    ] = ()
    grade: Annotated[
        Literal["C", "D"],
        Field(description="in-sample: C with replicated seeds; D without, for weak models or third-party runs"),
    ] = "D"

    @property
    def changes(self) -> tuple[Candidate, ...]:
        return tuple(candidate for candidate in self.candidates if candidate.recommended)

    @property
    def expected_gain(self) -> float | None:
        """The sum of the shrunk effects, assuming that they add up; in the objective's unit, signed."""
        return sum(change.shrunk or 0.0 for change in self.changes) if self.changes else None


class OnBases(Section):
    """One setting's effect on every basis that has pairs."""

    setting: str
    equal: Annotated[dict[str, Contrast | None], Field(description="by basis; None: no such pair")]
    wall_clock: Annotated[float | None, Field(description="mean training time, setting / baseline")]


class LearningRate(Section):
    tried: Annotated[dict[str, list[float]], Field(description="tuned field -> values tried")]
    best: Annotated[dict[str, list[float]], Field(description="tuned field -> values that were best somewhere")]
    n_at_edge: Annotated[int, Field(description="runs whose best value is at the edge of those tried")]
    n_runs: int
    used: Annotated[list[tuple[float, float]], Field(description="(lr, weight_decay) of these runs")]


class Mechanism(Section):
    chain: tuple[LinkEvidence, ...]
    interventions: Annotated[
        tuple[InterventionEffect, ...], Field(description="at the card's depth: `effect` is on the objective")
    ]
    supported_by: Annotated[
        str | None,
        Field(description="the intervention that moves the chain and the objective in the recipe's direction"),
    ]
    word: Annotated[RecipeWord | None, Field(description="None where nothing is recommended")]


class Prediction(Section):
    """One setting at the held-out depth: its predicted and its measured effect."""

    candidate: Candidate
    measured: Contrast | None


class Holdout(Section):
    """A depth predicted from shallower ones, or a width or a budget from smaller ones, and scored (see `holdout`)."""

    depth: Annotated[int | None, Field(description="n_layers of the recommendation")]
    axis: Annotated[str, Field(description="field of which a value was held out")] = "n_layers"
    held: Annotated[int | None, Field(description="the value that was held out; None: the depth")] = None
    fitted_on: tuple[int, ...]
    objective: str
    unit: str
    changes: Annotated[
        tuple[str, ...], Field(description="settings recommended from the fitted runs; none if it abstained")
    ]
    abstained: str
    predictions: tuple[Prediction, ...]
    error: float | None
    error_interval: tuple[float, float] | None = None
    error_of_no_effect: float | None
    naive: Annotated[
        str, Field(description="naive prediction: this setting, of the largest predicted gain, alone has an effect")
    ] = ""
    error_of_naive: float | None = None
    signs_right: int
    n_signs: int
    decisions_right: float
    n_decisions: int
    accuracy_interval: tuple[float, float] | None = None
    decisions_right_by_naive: float | None = None
    regret: Annotated[float | None, Field(description="None where the recommended configuration has no result there")]
    regret_of_baseline: float | None
    n_configurations: int
    gain: Annotated[Contrast | None, Field(description="recommended against baseline, at the held-out depth")]
    outcome: Outcome

    @property
    def decision_accuracy(self) -> float | None:
        return self.decisions_right / self.n_decisions if self.n_decisions else None

    @property
    def prediction(self) -> Literal["passed", "failed", "undecided"] | None:
        """Against predicting no effect: failed if the mean error is no smaller, passed if its whole interval is; None
        where no prediction could be compared."""
        if self.error is None or self.error_of_no_effect is None:
            return None
        if self.error >= self.error_of_no_effect:
            return "failed"
        return "passed" if self.error_interval and self.error_interval[1] < self.error_of_no_effect else "undecided"


class Ingredient(Section):
    """The whole recipe against the recipe without one change, on the fresh seeds."""

    left_out: str
    gain: Contrast | None
    verdict: Need


class Verification(Section):
    """The test on fresh seeds: the recipe against the baseline, and against itself with each change left out."""

    seeds: tuple[int, ...]
    run_ids: tuple[str, ...]
    gain: Contrast | None
    outcome: Outcome
    ingredients: tuple[Ingredient, ...]


class HeldOut(Section):
    depth_test: Holdout | None = None
    depth_outcome: Annotated[Outcome | None, Field(description="of this recipe, in the test at a held-out depth")] = (
        None
    )
    verification: Verification | None = None

    @property
    def outcomes(self) -> tuple[Outcome | None, Outcome | None]:
        """At the held-out depth, and on fresh seeds; None without a test."""
        return self.depth_outcome, self.verification.outcome if self.verification else None


class MeasuredConfiguration(Section):
    """A configuration at the recipe's depth, and the results of its runs (see `comparison_rows`)."""

    parts: Annotated[tuple[MeasuredPart, ...], Field(description="its role, or several roles")]
    setting: Annotated[str, Field(description="its differences from the baseline, as text")]
    lr: Annotated[float | None, Field(description="None where imported runs do not say")]
    rivals: Annotated[tuple[float, ...], Field(description="tested values of lr not distinguishable from it")] = ()
    n_seeds: Annotated[int, Field(description="0 where it was not run")]
    mean: Annotated[float | None, Field(description="of the objective over seeds, with Student's 95% interval")]
    lo: float | None
    hi: float | None
    accuracy: Annotated[float | None, Field(description="mean val_accuracy over runs; None of text")] = None
    flops: Annotated[float | None, Field(description="of training, over the baseline's")]
    train_flops: Annotated[float | None, Field(description="of training, of one run")] = None
    params: Annotated[int | None, Field(description="stored")] = None
    seconds: Annotated[float | None, Field(description="of training, mean; None where a run lacks it")] = None
    devices: Annotated[tuple[str, ...], Field(description="that its runs were trained on")] = ()


class Divergence(Section):
    run_id: str
    cause: str | None


class Provenance(Section):
    folders: list[str]
    run_ids: list[str]
    seeds: list[int]
    manifests: Annotated[str | None, Field(description="digest of the manifests' checksums; None where one is missing")]
    code: list[str]
    kernels: list[str]
    data: list[str]
    hours: Annotated[dict[str, float], Field(description="device -> wall-clock hours, tuning included")]
    node_hours: Annotated[float | None, Field(description="on a cluster, tuning and lost starts included")] = None
    command: str
    figures: str


class Card(Section):
    version: Annotated[int, Field(ge=1, description="rises with every test that is added")] = 1
    recipe: Recipe
    matched: tuple[OnBases, ...]
    learning_rate: LearningRate
    mechanism: Mechanism
    confounds: tuple[str, ...]
    held_out: HeldOut
    depth_slopes: Annotated[tuple[SlopeContrast, ...], Field(description="of each setting against its baseline's")]
    diverged: tuple[Divergence, ...]
    provenance: Provenance
    grade: Annotated[Grade | None, Field(description="None where nothing is recommended")]
    measured: Annotated[
        tuple[MeasuredConfiguration, ...], Field(description="recommended, baseline, best measured")
    ] = ()

    def with_verification(self, verification: Verification) -> "Card":
        """The card of the same recipe after it was verified."""
        held_out = self.held_out.model_copy(update={"verification": verification})
        supported = self.mechanism.supported_by is not None
        word = earned_word(self.recipe, supported, held_out.outcomes)
        return self.model_copy(
            update={
                "version": self.version + 1,
                "mechanism": self.mechanism.model_copy(update={"word": word}),
                "held_out": held_out,
                "grade": grade_of(self.recipe, supported, held_out.outcomes),
            }
        )


def earned_word(recipe: Recipe, supported: bool, outcomes: Sequence[str | None]) -> RecipeWord | None:
    """The evidence level of a recipe; `outcomes`: those of its held-out tests, None without a test. (For the verdict of
    a link of the chain see `sparsedepth.effects.causal_evidence`.)"""
    if not recipe.changes:
        return None
    if not passed(outcomes):
        return "in-sample"
    return "intervention-backed" if supported else "predicted"


def grade_of(recipe: Recipe, supported: bool, outcomes: Sequence[str | None]) -> Grade | None:
    """A: as B, and an intervention on one link of the chain works in the same direction. B: confirmed by held-out
    tests, from runs of several widths or budgets. C: in-sample, several seeds. D: models that lose to a bigram table of
    their text, or third-party runs. None where nothing is recommended, as always from single runs."""
    if not recipe.changes:
        return None
    if recipe.grade == "C" and passed(outcomes) and not recipe.domain.is_one_scale:
        return "A" if supported else "B"
    return recipe.grade


def passed(outcomes: Sequence[str | None]) -> bool:
    """Whether the recipe was tested on held-out runs, and every test confirmed it."""
    return {outcome for outcome in outcomes if outcome not in (None, "not tested")} == {"confirmed"}


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
            raise ValueError(f"{path} has {path.stat().st_size:,} bytes; a card may have {MAX_BYTES:,}")
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; write one with `sparsedepth recipe DIR -o FILE`") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is no recipe card: {error}") from None
    if not isinstance(values, dict):
        raise ValueError(f"{path} is no recipe card: it holds a {type(values).__name__}")
    return build(Card, values, str(path))


def write_card(path: Path, card: Card) -> Path:
    """Write the JSON next to `path`; returns its path."""
    path = card_path(path)
    write_json(path, card.model_dump(mode="json", by_alias=True))
    return path
