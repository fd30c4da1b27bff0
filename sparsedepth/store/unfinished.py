"""Why a sweep that is not finished has no result yet."""

from math import prod
from typing import TYPE_CHECKING

from sparsedepth.store.setting import grids_of
from sparsedepth.store.tuning_roles import IS_CHOSEN, IS_TRAINED

if TYPE_CHECKING:
    from sparsedepth.store.connection import Store


def only_tuning_text(store: "Store") -> str:
    """'only tuning runs are complete so far (3 of 30)'; '' where a result is complete, or no run at all."""
    sql = f"SELECT count(*), count(*) FILTER (NOT ({IS_CHOSEN})) FROM runs WHERE {IS_TRAINED}"
    ((n_trained, n_tuning),) = store.sql(sql).rows
    if not n_trained or n_tuning < n_trained:
        return ""
    planned = sum(
        len([*grid.grid()]) * prod(map(len, grid.tune.values())) * len(grid.tuning_seeds)
        for grid in grids_of(store.roots)
    )
    return f"only tuning runs are complete so far ({n_tuning}{f' of {planned}' if planned >= n_tuning else ''})"
