"""Compare a card's effects with published tables (papers.yaml): agrees, contradicts, or not comparable, and why.

    published effect = ln(perplexity / perplexity of its baseline) in nat/token, or a difference of the outcome

Signs are compared, sizes only shown: the models differ in size, data and training. A comparison needs the same choice
(the same value; for a weight decay, or a ratio of seq_len or group size, within a factor of two), the same kind of
model (decoder or ViT) and the same kind of outcome; a published accuracy of the trained task is compared with our loss,
with opposite sign. Where our effect is not distinguishable from 0, nothing is comparable.
"""

import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files as package_files
from typing import Annotated, Literal, get_args

from pydantic import Field

from sparsedepth.config.load import build, parse_yaml
from sparsedepth.config.section import Section
from sparsedepth.effects.contrast import Contrast
from sparsedepth.recipe.card import Agreement, Candidate, Compared, Recipe
from sparsedepth.store.comparable_loss import COMMON, OWN

Setting = bool | int | float | str
LOSSES = (OWN, COMMON, "train_loss", "val_bits_per_byte")
KNOBS = {"group_size": "n_kv_heads", "experts": "n_experts"}
"""Name of a published choice -> our knob, where they differ."""
FACTOR = 2.0
NAMES = {"decoder": "decoder", "vit": "vision transformer"}
UNITS = {
    "perplexity": "nat/token", "loss": "nat/token", "bits_per_byte": "bit/byte", "accuracy": "points of accuracy",
    "downstream_accuracy": "points of downstream accuracy",
}  # fmt: skip


class Published(Section):
    """One published table: the settings of one field."""

    paper: Annotated[str, Field(description="arXiv number, or project#issue")]
    source: str
    field: str
    architecture: Literal["decoder", "vit"] = "decoder"
    outcome: Literal[
        "perplexity", "loss", "bits_per_byte", "usefulness", "causal_score", "permutation_score", "accuracy",
        "downstream_accuracy",
    ]  # fmt: skip
    context: str
    baseline: Setting
    values: list[tuple[Setting, float]]

    @property
    def knob(self) -> str:
        return KNOBS.get(self.field, self.field)

    def effects(self) -> list[tuple[Setting, float]]:
        """Every setting but the baseline with its effect, in the table's unit."""
        base = next(value for setting, value in self.values if setting == self.baseline)
        others = [(setting, value) for setting, value in self.values if setting != self.baseline]
        if self.outcome != "perplexity":
            return [(setting, value - base) for setting, value in others]
        return [(setting, math.log(value / base)) for setting, value in others]


class Remark(Section):
    """A published finding without two values to compare; it is compared by direction where `says` gives one."""

    field: str
    source: str
    finding: str
    why: str
    setting: Setting | None = None
    says: Literal["helps", "does not help"] | None = None


class Papers(Section):
    tables: list[Published]
    remarks: list[Remark]


@cache
def papers() -> Papers:
    """The published tables that come with the package."""
    text = package_files("sparsedepth.recipe").joinpath("papers.yaml").read_text(encoding="utf-8")
    return build(Papers, parse_yaml(text, "papers.yaml"), "papers.yaml")


def compare_with_papers(recipe: Recipe) -> list[Compared]:
    """The published findings on every knob of the recipe's candidates, contradictions first."""
    knobs = {candidate.contrast.knob for candidate in recipe.candidates}
    rows = []
    for table in papers().tables:
        ours = [candidate for candidate in recipe.candidates if candidate.contrast.knob == table.knob]
        if ours:
            rows += _rows(table, ours, recipe)
    for remark in papers().remarks:
        if remark.field in knobs:
            row = _compared_by_direction(remark, recipe)
            rows.append(row or _not_comparable(remark.field, remark.why, remark.finding, remark.source))
    return sorted(rows, key=lambda row: get_args(Agreement).index(row.verdict))


def _compared_by_direction(remark: Remark, recipe: Recipe) -> Compared | None:
    """A finding that gives a direction against ours; None without a significant effect of ours."""
    same = [c.contrast for c in recipe.candidates if remark.says and c.values.get(remark.field) == remark.setting]
    contrast = next((contrast for contrast in same if contrast.outcome in LOSSES), None)
    if contrast is None or contrast.verdict == "not distinguishable" or contrast.effect.mean is None:
        return None
    agrees = (contrast.effect.mean < 0) == (remark.says == "helps")
    return Compared(
        verdict="agrees" if agrees else "contradicts",
        why=f"in sign; {remark.why}",
        knob=remark.field,
        contrast=contrast,
        published=remark.finding,
        source=remark.source,
    )


def _rows(table: Published, ours: Sequence[Candidate], recipe: Recipe) -> list[Compared]:
    """A row for every setting of a table that the card also has; one for all others together."""
    unit = UNITS.get(table.outcome, table.outcome)
    source = f"{table.paper}: {table.source}"
    n_heads = recipe.baseline.n_heads if recipe.baseline else None
    rows, others = [], []
    for setting, size in table.effects():
        candidate = next((each for each in ours if _same_choice(table, setting, each, n_heads)), None)
        if candidate is None:
            others.append(f"{setting} ({size:+.3g})")
            continue
        verdict, why = _judge(table, size, candidate.contrast, recipe)
        rows.append(
            Compared(
                verdict=verdict,
                why=why,
                knob=table.knob,
                contrast=candidate.contrast,
                published=f"{table.field} {setting} vs {table.baseline}: {size:+.3g} {unit} ({table.context})",
                published_effect=size,
                source=source,
            )
        )
    if others:
        have = "; ".join(f"{each.contrast.setting} vs {each.contrast.baseline}" for each in ours)
        published = f"{table.field} {', '.join(others)} {unit} vs {table.baseline} ({table.context})"
        rows.append(_not_comparable(table.knob, f"another choice: the card compares {have}", published, source))
    return rows


def _not_comparable(knob: str, why: str, published: str, source: str) -> Compared:
    return Compared(verdict="not comparable", why=why, knob=knob, published=published, source=source)


def _judge(table: Published, size: float, contrast: Contrast, recipe: Recipe) -> tuple[Agreement, str]:
    ours = recipe.baseline.architecture if recipe.baseline else table.architecture
    if ours != table.architecture:
        return "not comparable", f"the card is of a {NAMES[ours]}, the table of a {NAMES[table.architecture]}"
    outcome = {"accuracy": "val_accuracy"}.get(table.outcome, table.outcome)
    is_reversed = outcome == "val_accuracy" and contrast.outcome in LOSSES
    is_loss = table.outcome in ("perplexity", "loss", "bits_per_byte")
    if not (contrast.outcome in LOSSES if is_loss or is_reversed else contrast.outcome == outcome):
        return "not comparable", f"the card's objective is {contrast.outcome}, the table's {table.outcome}"
    if table.field == "seq_len" and contrast.outcome == COMMON:
        return "not comparable", f"the table scores each model at its own length, as a card of {OWN} does"
    if contrast.n_diverged and abs(size) > 1 and table.outcome == "perplexity":
        return ("agrees" if size > 0 else "contradicts"), f"{contrast.n_diverged} of our runs diverged"
    if contrast.verdict == "not distinguishable" or contrast.effect.mean is None:
        return "not comparable", "our effect is not distinguishable from 0"
    if size == 0:
        return "not comparable", "the published values are equal at their resolution"
    agrees = (size > 0) == ((contrast.effect.mean > 0) != is_reversed)
    against = ", its accuracy against our loss" if is_reversed else ""
    return ("agrees" if agrees else "contradicts"), f"in sign{against}; one published run each, no interval"


def _same_choice(table: Published, setting: Setting, candidate: Candidate, n_heads: int | None) -> bool:
    if {*candidate.values} - {table.knob} and table.field != "experts":
        return False  # other fields change with it
    ours, baseline = candidate.values.get(table.knob), candidate.baseline_values.get(table.knob)
    if table.field == "experts":
        return bool(ours) and not baseline
    if table.field == "group_size" and n_heads and ours and baseline:
        ours, baseline = n_heads / ours, n_heads / baseline
    if isinstance(setting, str) or not all(isinstance(value, int | float) for value in (setting, table.baseline)):
        return (ours, baseline) == (setting, table.baseline)
    assert isinstance(setting, int | float) and isinstance(table.baseline, int | float)
    if not isinstance(ours, int | float) or not isinstance(baseline, int | float):
        return False
    if table.baseline == 0 or baseline == 0:
        return baseline == table.baseline and _is_near(ours, setting)
    # lengths and group sizes are compared by their ratio to the baseline, and its direction
    return (ours > baseline) == (setting > table.baseline) and _is_near(ours / baseline, setting / table.baseline)


def _is_near(a: float, b: float) -> bool:
    return b > 0 and a > 0 and 1 / FACTOR <= a / b <= FACTOR
