"""The runs of a chain with what all its links need, and the links over paired runs (`chain`)."""

from dataclasses import replace
from functools import cached_property

import pandas as pd

from sparsedepth.config.role import roles
from sparsedepth.config.run import RunConfig
from sparsedepth.effects.all_effects import effects_over_depths, relevant_columns
from sparsedepth.effects.chain import LINKS, Link, given_of_tuning, link_of, links_of, units_of, usable_runs
from sparsedepth.effects.contrast import Contrast
from sparsedepth.effects.knobs import Design, Knob, design_of, find_knobs, keys, labels
from sparsedepth.effects.pairs import pairs
from sparsedepth.store.comparable_loss import loss_of
from sparsedepth.store.tuning_roles import result_rows


class ChainRuns:
    """The runs of a chain, and what all its links need, computed once."""

    def __init__(self, runs: pd.DataFrame):
        runs = result_rows(runs)
        self.links, self.loss = links_of(runs), loss_of(runs)
        named = {name for pair in (*LINKS, *self.links) for name in pair}
        named |= {name for role in roles(RunConfig).values() for name in role.must_stand_still}
        runs = relevant_columns(runs, *sorted(named), self.loss, "lr")
        self.runs = runs.assign(unit=units_of(runs))
        self._effects: dict[str, dict[str, Contrast]] = {}
        self._changes: dict[tuple[str, str], pd.DataFrame] = {}
        self._contexts: dict[str, tuple[pd.Series, pd.Series]] = {}

    @cached_property
    def knobs(self) -> list[Knob]:
        return find_knobs(self.runs)

    @cached_property
    def pure_knobs(self) -> list[Knob]:
        return [knob for knob in self.knobs if knob.is_pure]

    @cached_property
    def design(self) -> Design:
        return design_of(self.runs)

    @cached_property
    def given_of_tuning(self) -> tuple[pd.DataFrame, list[str]]:
        return given_of_tuning(self.runs)

    def effects(self, outcome: str) -> dict[str, Contrast]:
        """Setting -> its effect on an outcome over all depths."""
        if outcome not in self._effects:
            contrasts = effects_over_depths(self.runs, self.knobs, outcome, self.design)
            self._effects[outcome] = {contrast.setting: contrast for contrast in contrasts}
        return self._effects[outcome]

    def changes(self, knob: Knob, outcome: str) -> pd.DataFrame:
        """The knob's `pairs` of runs, in the same order for every outcome."""
        if (knob.name, outcome) not in self._changes:
            self._changes[knob.name, outcome] = pairs(self.runs, knob, outcome, design=self.design)
        return self._changes[knob.name, outcome]

    def contexts(self, knob: Knob) -> tuple[pd.Series, pd.Series]:
        """Each run's context (the key of all fields but the knob and the seed), and its setting of the knob."""
        if knob.name not in self._contexts:
            fields = [name for name in self.design.chosen if name not in {*knob.fields, "seed"}]
            self._contexts[knob.name] = keys(self.runs, fields), labels(self.runs, knob)
        return self._contexts[knob.name]


def link_within(chain: ChainRuns, knob: Knob, cause: str, effect: str) -> Link:
    """One link over runs that differ in one knob and the seed alone; contexts with one setting do not count."""
    contexts, settings = chain.contexts(knob)
    usable = usable_runs(chain.runs, [cause, effect])
    usable = usable[usable.groupby(contexts[usable.index])["cell_id"].transform("nunique") > 1]
    stratum_N = pd.factorize(contexts[usable.index])[0]
    within = link_of(chain.runs, usable, [cause, effect], f"within {knob.name}", stratum_N, settings[usable.index])
    return replace(within, knob=knob.name)


def link_between(chain: ChainRuns, cause: str, effect: str) -> Link:
    """One link over settings of all pure knobs: mean paired change in the cause against that in the effect."""
    points, used = list[tuple[str, int, float, float]](), set[str]()
    for knob in chain.pure_knobs:
        x, y = (chain.changes(knob, name) for name in (cause, effect))
        both = x.assign(other=y["difference"]).dropna(subset=["difference", "other"])
        changes = both.groupby(["setting", "n_layers"])[["difference", "other"]].mean().reset_index()
        points += list(changes.itertuples(index=False, name=None))
        used |= {*both["run_id"], *both["run_id_baseline"]}
    frame = pd.DataFrame(points, columns=["unit", "n_layers", cause, effect]).astype({cause: float, effect: float})
    frame = frame.assign(outcome="ok")
    between = link_of(frame, frame, [cause, effect], "between knobs", frame["n_layers"].to_numpy(), frame["unit"])
    return replace(between, n_runs=len(used))
