"""A folder that a sampler filled: TPE, NSGA-II, random search or quasi-Monte Carlo. Its proposals are no ladder.

No proposal is a baseline, since none was chosen to be one. What a search gives is its *front* (no other proposal is at
least as good in every objective and better in one) and, since few seeds chose each, a list to run again with new ones.
A proposal whose other seeds were ended early has the seeds that survived, which flatter it: its mean is no score.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sparsedepth import quantities
from sparsedepth.config.seeds import own_seeds
from sparsedepth.config.sweep import SweepDefinition, read_definition
from sparsedepth.files import write_text

FRESH = 5
"""Seeds that a shortlist is run with again."""


@dataclass(frozen=True, kw_only=True)
class Search:
    definition: SweepDefinition

    @property
    def axes(self) -> tuple[str, ...]:
        """The fields that the sampler chose; those that are zipped to them follow."""
        return tuple(self.definition.varied)

    @property
    def objectives(self) -> tuple[str, ...]:
        return tuple(self.definition.objectives)

    @property
    def n_seeds(self) -> int:
        """Seeds that a proposal has at least, unless a run of it was ended early, failed or is still to come."""
        seeds = self.definition.seeds
        return min(len(own_seeds(entry, seeds)) for entry in ({}, *self.definition.variants, *self.definition.cells))

    @property
    def text(self) -> str:
        kind = {"tpe": "TPE", "nsga2": "NSGA-II", "qmc": "quasi-Monte Carlo"}.get(self.definition.sampler, "random")
        return (
            f"a {kind} search over {', '.join(self.axes)}: proposals, none of them a baseline; what stands first was "
            f"lucky, too, until it is run with other seeds"
        )


def search_of(roots: Sequence[Path]) -> Search | None:
    """The search that filled these folders; None where there are several, or one of them was filled otherwise."""
    try:
        definitions = [read_definition(root) for root in roots if root.is_dir()]
    except ValueError:  # no definition of this version: nothing is known of a sampler
        return None
    if len(definitions) != 1 or definitions[0] is None or definitions[0].sampler == "grid":
        return None
    return Search(definition=definitions[0])


def on_front(values_CK: np.ndarray, objectives: Sequence[str]) -> np.ndarray:
    """Which rows no other row dominates, (C,); a row with a missing objective is on none."""
    loss_CK = values_CK * np.array([-quantities.sign(name) for name in objectives])
    known_C = np.asarray(np.isfinite(loss_CK).all(axis=1))
    loss_CK = np.where(known_C[:, None], loss_CK, np.inf)
    no_worse = np.all(loss_CK[:, None] <= loss_CK[None], axis=2)
    better = np.any(loss_CK[:, None] < loss_CK[None], axis=2)
    return known_C & ~np.any(no_worse & better, axis=0)


def rerun_definition(
    search: Search, chosen: Sequence[Mapping[str, Any]], out: Path, n_seeds: int = FRESH
) -> SweepDefinition:
    """Write the sweep of these configurations (fields -> values) with seeds that no proposal had. Raises ValueError
    where `out` exists."""
    from sparsedepth.config.load import yaml_text

    if out.exists():
        raise ValueError(f"{str(out)!r} exists; name another file with --again")
    searched = search.definition
    first = max(searched.seeds) + 1
    values = {
        "name": f"{searched.name}-again"[:64],
        "question": "Do the best proposals of the search stay the best with other seeds?",
        "hypothesis": "Their order is partly luck: the first loses most.",
        "matched": searched.matched,
        "objectives": list(searched.objectives),
        "base": searched.base,
        "cells": [{name: knobs[name] for name in search.axes if knobs.get(name) is not None} for knobs in chosen],
        "seeds": list(range(first, first + n_seeds)),
    }
    definition = SweepDefinition.model_validate(values)
    write_text(out, yaml_text(values, width=120))
    return definition
