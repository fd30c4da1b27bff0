"""The recipe card: what is claimed, where, how sure, and on what evidence. Thirteen fields, kept as JSON.

It is data for programs (`recipe verify`, `recipe compare`) first; `page` writes it for readers. Numbers are unrounded.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from sparsedepth.config.load import MAX_BYTES, build
from sparsedepth.config.model import Section
from sparsedepth.config.run import RunConfig
from sparsedepth.files import write_json

SUFFIX = ".card.json"

Verdict = Literal["lower", "higher", "not distinguishable"]
Outcome = Literal["confirmed", "refuted", "not confirmed", "not tested"]
Need = Literal["needed", "harmful", "not distinguishable", "not compared"]
Grade = Literal["A", "B", "C", "D"]
Values = dict[str, Any]


class Change(Section):
    """One ingredient: a knob moved away from its baseline."""

    knob: str
    setting: str
    baseline: str
    values: Annotated[Values, Field(description="RunConfig field -> value at the setting")]
    baseline_values: Values


class Rule(Section):
    sentence: str
    depth: int | None
    objective: str
    unit: str
    matched: str
    changes: list[Change]
    abstained: Annotated[str, Field(description="why nothing is recommended; empty if something is")]
    baseline: Annotated[Values | None, Field(description="RunConfig without seed")]
    config: Annotated[Values | None, Field(description="RunConfig without seed; the baseline where it abstains")]
    expected_gain: Annotated[float | None, Field(description="sum of the shrunk effects; their sign is kept")]
    shrinkage: str


class Domain(Section):
    place: Literal["inside", "interpolation", "extrapolation"]
    depths: list[int]
    values: dict[str, str]


class Effect(Section):
    """One setting against its baseline, at the card's depth, with nothing else differing."""

    knob: str
    setting: str
    baseline: str
    values: Values
    baseline_values: Values
    mean: float | None
    lo: float | None
    hi: float | None
    p_holm: float | None
    n_pairs: int
    n_seeds: int
    n_diverged: int
    noise: float | None
    floor: float | None
    verdict: Verdict
    shrunk: float | None
    reliability: float | None
    recommended: bool
    reason: Annotated[str, Field(description="why it is no part of the recipe")]
    n_heads: Annotated[int | None, Field(description="of the baseline: tells group sizes")]


class OnBases(Section):
    """One setting with a basis held equal, where the runs allow it; and what it spends, setting / baseline."""

    setting: str
    equal: Annotated[dict[str, Values | None], Field(description="basis -> mean, lo, hi, n; None: no such pair")]
    ratios: Annotated[dict[str, list[float] | None], Field(description="basis -> smallest and largest ratio")]
    wall_clock: Annotated[float | None, Field(description="ratio of the mean training times")]


class Intervention(Section):
    """A change of one link of the chain alone, without the knobs that the recipe moves."""

    setting: str
    link: str
    moves_link: Verdict
    moves_objective: Verdict


class Mechanism(Section):
    links: Annotated[list[Values], Field(description="rank correlations, each with the word that its link has earned")]
    interventions: list[Intervention]
    word: Literal["associated", "predicts", "causes"]
    supported: Annotated[bool, Field(description="whether an intervention works the way that the recipe does")]
    why: str


class Ingredient(Section):
    """The whole recipe against the recipe without one change, in the verification."""

    left_out: str
    gain: str
    verdict: Need


class Verification(Section):
    """Fresh seeds: the recipe against the baseline, and against itself with each change left out."""

    seeds: list[int]
    run_ids: list[str]
    gain: float | None
    gain_text: str
    outcome: Outcome
    ingredients: list[Ingredient]


class HeldOut(Section):
    depth_test: Values | None
    depth_outcome: Outcome | None
    depth_sentences: list[str]
    verification: Verification | None


class Interactions(Section):
    stack: str
    leave_one_out: list[Ingredient]
    with_depth: list[str]


class Provenance(Section):
    folders: list[str]
    run_ids: list[str]
    seeds: list[int]
    manifests: Annotated[str | None, Field(description="digest of the manifests' checksums; None where one is missing")]
    code: list[str]
    kernels: list[str]
    data: list[str]
    hours: Annotated[dict[str, float], Field(description="device -> wall-clock hours, tuning included")]
    command: str
    figures: str


class Graded(Section):
    letter: Grade
    in_sample: Literal["C", "D"]
    why: str


class Card(Section):
    """The thirteen fields."""

    version: Annotated[int, Field(ge=1, description="rises with every test that is added")] = 1
    rule: Rule
    domain: Domain
    effects: list[Effect]
    matched: list[OnBases]
    learning_rate: list[str]
    tune: Annotated[dict[str, list[float]], Field(description="tuned field -> values tried")]
    mechanism: Mechanism
    confounds: list[str]
    held_out: HeldOut
    interactions: Interactions
    negative: list[str]
    literature: list[Values]
    provenance: Provenance
    grade: Graded


def card_path(path: Path) -> Path:
    """Where the card of a recipe lies: beside its YAML, and the same for the card's own files."""
    name = path.name
    for suffix in (SUFFIX, ".card.md", ".yaml", ".yml"):
        if name.endswith(suffix):
            return path.with_name(name.removesuffix(suffix) + SUFFIX)
    return path.with_name(name + SUFFIX)


def read_card(path: Path) -> Card:
    """A card from its JSON, or from the recipe's YAML beside it. Raises ValueError for anything else."""
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
    """Write the JSON beside `path`; returns where."""
    path = card_path(path)
    write_json(path, card.model_dump(mode="json"))
    return path


def config_of(values: Values) -> RunConfig:
    """A configuration of the card, with seed 0. Raises ValueError for one that cannot be built."""
    return build(RunConfig, values, "the card's configuration")


def word_of(supported: bool, outcomes: Sequence[str | None]) -> Literal["associated", "predicts", "causes"]:
    """The word that the tests earn; `outcomes` are those of the held-out tests, None where there was none."""
    if not passed(outcomes):
        return "associated"
    return "causes" if supported else "predicts"


def passed(outcomes: Sequence[str | None]) -> bool:
    """Whether a held-out test confirmed the recipe, and none did not: a failure is not outvoted."""
    made = {one for one in outcomes if one not in (None, "not tested")}
    return made == {"confirmed"}


def grade_of(in_sample: Literal["C", "D"], supported: bool, depth: str | None, fresh: str | None) -> Graded:
    """The grade that the tests earn: `depth` is the outcome at the held-out depth, `fresh` that on fresh seeds.

    A: held-out confirmed, and an intervention on one link of the chain works the same way. B: held-out confirmed.
    C: in-sample, several seeds. D: single runs.
    """
    made = [f"{one} {where}" for one, where in ((depth, "at a held-out depth"), (fresh, "on fresh seeds")) if one]
    letter: Grade = in_sample
    if in_sample == "C" and passed((depth, fresh)):
        letter = "A" if supported else "B"
    seeds = "in-sample, several seeds" if in_sample == "C" else "in-sample, no replicates"
    proof = "supported by an intervention" if supported else "no intervention supports the mechanism"
    return Graded(letter=letter, in_sample=in_sample, why=f"{seeds}; {', '.join(made) or 'no held-out test'}; {proof}")
