"""Folders filled by a sampler: TPE, NSGA-II, random search or quasi-Monte Carlo.

A search has no baseline. Its results are the Pareto *front* (no other proposal is at least as good in all objectives
and better in one), and a shortlist to run again with new seeds, because the best of many is optimistic. A proposal with
pruned seeds has no score: the mean of the surviving seeds is optimistic."""

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from sparsedepth import quantities
from sparsedepth.config.space import own_seeds
from sparsedepth.config.sweep import SweepDefinition, read_definition
from sparsedepth.files import write_text
from sparsedepth.quantities.quantity import Row

FRESH = 5
"""Seeds to run a shortlist with."""
MATCHED = 0.01
"""A cost is equal if both sides agree to 1%."""


def definitions_of(roots: Sequence[Path]) -> list[SweepDefinition]:
    """The definitions of the sweeps that fill these folders."""
    found = []
    for root in roots:
        with contextlib.suppress(ValueError):  # a definition of another version
            found.append(read_definition(root))
    return [*filter(None, found)]


def search_of(roots: Sequence[Path]) -> SweepDefinition | None:
    """The search that filled this folder; None for several folders, or one without a search."""
    folders = [root for root in roots if root.is_dir()]
    searches = [definition for definition in definitions_of(folders) if definition.is_search]
    return searches[0] if searches and len(folders) == 1 else None


def least_seeds(search: SweepDefinition) -> int:
    """The least number of seeds of a proposal none of whose runs was pruned, failed or is unfinished."""
    return min(len(own_seeds(entry, search.seeds)) for entry in ({}, *search.variants, *search.cells))


def on_front(values_CK: np.ndarray, objectives: Sequence[str]) -> np.ndarray:
    """Whether each row is on the Pareto front, (C,); rows with a missing objective are not. FLOPs within MATCHED
    are equal."""
    loss_CK = values_CK * np.array([-quantities.sign(name) for name in objectives])
    known_C = np.asarray(np.isfinite(loss_CK).all(axis=1))
    equal_CK = np.nan_to_num(loss_CK) * np.array([MATCHED * (name == "train_flops") for name in objectives])
    loss_CK = np.where(known_C[:, None], loss_CK, np.inf)
    no_worse_CC = np.all(loss_CK[:, None] <= loss_CK + equal_CK, axis=2)
    better_CC = np.any(loss_CK[:, None] < loss_CK - equal_CK, axis=2)
    return known_C & ~np.any(no_worse_CC & better_CC, axis=0)


def rerun_definition(search: SweepDefinition, chosen: Sequence[Row], out: Path) -> SweepDefinition:
    """Write a sweep of these configurations with FRESH new seeds. Raises ValueError if `out` exists."""
    from sparsedepth.config.load import yaml_text

    if out.exists():
        raise ValueError(f"{str(out)!r} exists; name another file with --again")
    first = max([*search.seeds, *search.tuning_seeds]) + 1
    values = {
        "name": f"{search.name}-again"[:64],
        "question": "Do the best proposals of the search stay the best with other seeds?",
        "hypothesis": "Their order is partly chance: the first will lose most.",
        "matched": search.matched,
        "objectives": list(search.objectives),
        "base": search.base,
        "cells": [
            {name: of.get(name) for name in search.varied if of.get(name) is not None or name in search.base}
            for of in chosen
        ],
        "seeds": list(range(first, first + FRESH)),
    }
    definition = SweepDefinition.model_validate(values)
    write_text(out, yaml_text(values, width=120))
    return definition
