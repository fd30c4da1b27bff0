"""Lay a card's effects beside the published tables (papers.yaml): agrees, contradicts, or not comparable, with why.

    published effect = ln(perplexity / perplexity of its baseline) in nat/token, or a difference of usefulness

Signs are compared, sizes only shown: the models differ in size, data and training. A comparison needs the same choice
(the same words; a weight decay or a factor of seq_len or group size within a factor of two) and the same kind of
outcome. Where ours is not distinguishable from 0 nothing is claimed either way.
"""

import math
from collections.abc import Sequence
from functools import cache
from importlib.resources import files as package_files
from typing import Annotated, Literal

from pydantic import Field

from sparsedepth.config.load import build, parse_yaml
from sparsedepth.config.model import Section
from sparsedepth.recipe.card import Effect, Values

Setting = bool | int | float | str
LOSSES = ("val_loss", "val_loss_common", "train_loss", "val_bits_per_byte")
KNOBS = {"group_size": "n_kv_heads", "experts": "n_experts"}
"""Published choice -> the knob that makes it, where the words differ."""
FACTOR = 2.0


class Published(Section):
    """One published table: the settings of one field."""

    paper: Annotated[str, Field(description="arXiv number")]
    source: str
    field: str
    outcome: Literal["perplexity", "usefulness"]
    context: str
    baseline: Setting
    values: list[tuple[Setting, float]]

    @property
    def knob(self) -> str:
        return KNOBS.get(self.field, self.field)

    def effects(self) -> list[tuple[Setting, float]]:
        """Every setting but the baseline with its effect: in nat/token, or of usefulness."""
        base = next(value for setting, value in self.values if setting == self.baseline)
        rest = [(setting, value) for setting, value in self.values if setting != self.baseline]
        if self.outcome == "usefulness":
            return [(setting, value - base) for setting, value in rest]
        return [(setting, math.log(value / base)) for setting, value in rest]


class Remark(Section):
    """A published finding without two values to compare."""

    field: str
    source: str
    finding: str
    why: str


class Papers(Section):
    tables: list[Published]
    remarks: list[Remark]


@cache
def papers() -> Papers:
    """The published tables that come with the package."""
    text = package_files("sparsedepth.recipe").joinpath("papers.yaml").read_text(encoding="utf-8")
    return build(Papers, parse_yaml(text, "papers.yaml"), "papers.yaml")


def compare_effects(effects: Sequence[Effect], objective: str) -> list[Values]:
    """What is published on every knob that the card has an effect of: contradictions first.

    Keys: verdict, why, ours (setting vs baseline), our_effect, our_lo, our_hi, published, published_effect, source.
    """
    knobs = {effect.knob for effect in effects}
    rows = []
    for table in papers().tables:
        ours = [effect for effect in effects if effect.knob == table.knob]
        if ours:
            rows += _rows(table, ours, objective)
    for remark in papers().remarks:
        if remark.field in knobs:
            rows.append(_nothing(remark.field, remark.why, remark.finding, remark.source))
    order = ("contradicts", "agrees", "not comparable")
    return sorted(rows, key=lambda row: order.index(row["verdict"]))


def _rows(table: Published, ours: Sequence[Effect], objective: str) -> list[Values]:
    """A row for every setting of a table that the card has, too; one for all the others together."""
    unit = "nat/token" if table.outcome == "perplexity" else "usefulness"
    source = f"{table.paper}: {table.source}"
    rows, others = [], []
    for setting, size in table.effects():
        effect = next((one for one in ours if _same_choice(table, setting, one)), None)
        if effect is None:
            others.append(f"{setting} ({size:+.3g})")
            continue
        verdict, why = _judge(table, size, effect, objective)
        rows.append(
            {
                "verdict": verdict,
                "why": why,
                "ours": f"{effect.setting} vs {effect.baseline}",
                "our_effect": effect.mean,
                "our_lo": effect.lo,
                "our_hi": effect.hi,
                "published": f"{table.field} {setting} vs {table.baseline}: {size:+.3g} {unit} ({table.context})",
                "published_effect": size,
                "source": source,
            }
        )
    if others:
        have = "; ".join(f"{effect.setting} vs {effect.baseline}" for effect in ours)
        published = f"{table.field} {', '.join(others)} {unit} vs {table.baseline} ({table.context})"
        rows.append(_nothing(table.knob, f"another choice: the card compares {have}", published, source))
    return rows


def _nothing(ours: str, why: str, published: str, source: str) -> Values:
    return {
        "verdict": "not comparable",
        "why": why,
        "ours": ours,
        "our_effect": None,
        "our_lo": None,
        "our_hi": None,
        "published": published,
        "published_effect": None,
        "source": source,
    }


def _judge(table: Published, size: float, effect: Effect, objective: str) -> tuple[str, str]:
    same = objective in LOSSES if table.outcome == "perplexity" else objective == "usefulness"
    if not same:
        return "not comparable", f"the card's objective is {objective}, the table's {table.outcome}"
    if effect.n_diverged and abs(size) > 1 and table.outcome == "perplexity":
        return ("agrees" if size > 0 else "contradicts"), f"{effect.n_diverged} of our runs diverged"
    if effect.verdict == "not distinguishable" or effect.mean is None:
        return "not comparable", "ours is not distinguishable from no effect"
    if size == 0:
        return "not comparable", "the published values are equal, to the step that they are counted in"
    agrees = (size > 0) == (effect.mean > 0)
    return ("agrees" if agrees else "contradicts"), "in sign; one published run each, no interval"


def _same_choice(table: Published, setting: Setting, effect: Effect) -> bool:
    if {*effect.values} - {table.knob} and table.field != "experts":
        return False  # other fields move with it
    here, there = effect.values.get(table.knob), effect.baseline_values.get(table.knob)
    if table.field == "experts":
        return bool(here) and not there
    if table.field == "group_size" and effect.n_heads and here and there:
        here, there = effect.n_heads / here, effect.n_heads / there
    if isinstance(setting, str) or not all(isinstance(one, int | float) for one in (setting, table.baseline)):
        return (here, there) == (setting, table.baseline)
    assert isinstance(setting, int | float) and isinstance(table.baseline, int | float)
    if not isinstance(here, int | float) or not isinstance(there, int | float):
        return False
    if table.baseline == 0 or there == 0:
        return there == table.baseline and _near(here, setting)
    # lengths and group sizes: the factor counts, and its direction
    return (here > there) == (setting > table.baseline) and _near(here / there, setting / table.baseline)


def _near(one: float, other: float) -> bool:
    return other > 0 and one > 0 and 1 / FACTOR <= one / other <= FACTOR


def lines(rows: Sequence[Values]) -> list[str]:
    """The comparison as text, verdict first."""
    if not rows:
        return ["no published table compares what this card does"]
    counts = {verdict: sum(row["verdict"] == verdict for row in rows) for verdict in ("agrees", "contradicts")}
    rest = len(rows) - sum(counts.values())
    said = [f"{counts['agrees']} agree, {counts['contradicts']} contradict, {rest} cannot be compared"]
    for row in rows:
        ours = ""
        if row["our_effect"] is not None:
            interval = "" if row["our_lo"] is None else f" ({row['our_lo']:+.3g} to {row['our_hi']:+.3g})"
            ours = f" {row['our_effect']:+.3g}{interval}"
        said.append(f"{row['verdict']}: {row['ours']}:{ours} | {row['published']} [{row['source']}]: {row['why']}")
    return said
