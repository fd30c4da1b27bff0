"""The rows of `runs` that a figure of many runs shows: trained ones, at the values that tuning chose."""

from typing import TYPE_CHECKING

from sparsedepth.plots.page import NothingToDraw

if TYPE_CHECKING:
    import pandas as pd

    from sparsedepth.store.connection import Store


def trained(runs: "pd.DataFrame") -> "pd.DataFrame":
    """The runs that have a training configuration: a model that was only measured has no knobs to compare."""
    return runs[runs["train_tokens"].notna()].astype({"n_layers": int})


def chosen(runs: "pd.DataFrame") -> "pd.DataFrame":
    """Without the runs at values that tuning tried and did not choose."""
    return runs[runs["tuning"] != "rejected"] if "tuning" in runs.columns else runs


def check_comparable(runs: "pd.DataFrame") -> None:
    """Raises NothingToDraw unless a run that finished has a training configuration."""
    if not len(runs):
        raise NothingToDraw("the store holds no runs")
    known = runs[runs["train_tokens"].notna()]
    if not len(known):
        raise NothingToDraw(
            "no finished run has a training configuration, so there is nothing to compare; draw --figure card"
        )
    if not (known["outcome"] == "ok").any():
        raise NothingToDraw(f"none of the {len(known)} runs finished, so there is nothing to draw")


def trained_runs(store: "Store") -> "pd.DataFrame":
    """The trained, chosen rows of a store's `runs`. Raises NothingToDraw where none finished."""
    runs = store.frame("select * from runs")
    check_comparable(runs)
    return trained(chosen(runs)).reset_index(drop=True)
