"""Which loss compares runs: val_loss, at each run's own seq_len, or val_loss_common, at one context length for all.

A longer context lowers the loss by itself, since later positions are easier. Runs that differ in seq_len are therefore
compared by val_loss_common if all finished runs have it at the same context (without eval_seq_len it equals val_loss).
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from sparsedepth.config.role import fields_where
from sparsedepth.config.run import RunConfig
from sparsedepth.store.tuning_roles import IS_TRAINED

if TYPE_CHECKING:
    import pandas as pd

    from sparsedepth.store.connection import Store

Loss = Literal["val_loss", "val_loss_common"]
OWN: Loss = "val_loss"
COMMON: Loss = "val_loss_common"
LOSSES = (OWN, COMMON, "val_bits_per_byte", "train_loss")
DATA = (*fields_where(RunConfig, lambda role: role.kind == "data"), "seq_len")
"""Fields between whose values losses are not comparable."""


def differing_data(rows: "pd.DataFrame") -> str:
    """The fields of data and length in which these rows differ, comma-separated."""
    return ", ".join(name for name in DATA if name in rows and rows[name].nunique(dropna=False) > 1)


def loss_of(runs: "pd.DataFrame") -> Loss:
    """The loss that compares these rows of `runs`."""
    if not {"seq_len", "eval_seq_len", COMMON} <= set(runs.columns):
        return OWN
    finished = runs[runs["outcome"] == "ok"]
    is_common = finished["seq_len"].nunique() > 1 and finished[COMMON].notna().all() and has_one_context(finished)
    return COMMON if is_common else OWN


def has_one_context(runs: "pd.DataFrame") -> bool:
    """Whether val_loss_common has the same context in these rows of `runs`; NULL in imported ones is unknown."""
    import pandas as pd

    own, evaluated = (pd.to_numeric(runs[name], errors="coerce") for name in ("seq_len", "eval_seq_len"))
    context = evaluated.fillna(own.where(runs["origin"].isna()) if "origin" in runs.columns else own)
    return context.nunique() < 2


def loss_in(store: "Store") -> Loss:
    """The loss that compares all trained runs of a store; the rule of `loss_of`, without pandas."""
    ((is_common,),) = store.sql(
        f"SELECT count(DISTINCT seq_len) > 1 AND bool_and({COMMON} IS NOT NULL)"
        " AND count(DISTINCT coalesce(eval_seq_len, if(origin IS NULL, seq_len, NULL))) < 2 FROM runs"
        f" WHERE outcome = 'ok' AND {IS_TRAINED}"
    ).rows
    return COMMON if is_common else OWN


def with_loss(loss: str, names: Iterable[str]) -> tuple[str, ...]:
    """The names, with val_loss replaced by this loss."""
    return tuple(loss if name == OWN else name for name in names)
