"""Figures of single models. `models`: the blocks that measured models need against those that they have, with the
interval over sequences; at an equal rise of the loss, where bytes are known of any. The colour is the family; hollow:
weights below fp32. On the line all blocks are needed.

`removal`: what each task of `evaluate --without all` loses without a layer, with the interval over its documents, and
the relative loss increase without it, where it was measured."""

from functools import partial
from itertools import cycle

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from sparsedepth.plots.facets import Panel, lines_drawing
from sparsedepth.plots.page import Drawing, NothingToDraw, caption, legend_above, panels
from sparsedepth.plots.runs import all_runs, short_names, shown_settings, trained_runs
from sparsedepth.plots.style import GREY, MARKERS, SERIES
from sparsedepth.quantities import axis_label
from sparsedepth.store.connection import Store
from sparsedepth.store.saved_queries import ask
from sparsedepth.words.captions import escaped, models_caption

MOST_NAMES = 12
MOST = 5
"""Models of a panel."""
REMOVED = r"""
select * from (
    select concat_ws(', ', task, metric, nullif(filter, 'none')) as panel, run_id, model, without::int as x, value as
        mean, lo, hi
    from evals where metric like '%\_lost' escape '\' and regexp_full_match(without, '\d+')
    union all
    select 'skip_loss_increase', run_id, null, layer, value, null, null
    from layers where metric = 'skip_loss_increase' and run_id in (select run_id from evals where without is not null)
    qualify step = max(step) over (partition by run_id)
) order by panel = 'skip_loss_increase', panel, run_id, model, x
"""


def models(store: Store) -> Drawing:
    """Its points: the rows of `query --ask models`. Raises NothingToDraw."""
    if all_runs(store)["model"].isna().all():
        raise NothingToDraw("no model of others was measured; sparsedepth measure MODEL -o DIR/models/NAME")
    rows = ask(store, "models").frame().drop(columns="packages")
    if rows["needed_layers"].isna().all():
        raise NothingToDraw("no measured model has needed layers; measure usefulness")
    needed = "needed_layers" if rows["needed_equal_rise"].isna().all() else "needed_equal_rise"
    return Drawing(data=rows, page=partial(_page, rows.dropna(subset=needed), needed, int(rows[needed].isna().sum())))


def removal(store: Store) -> Drawing:
    """A panel for each task and metric, a line for each model. Raises NothingToDraw."""
    rows = store.frame(REMOVED).astype({"run_id": "str"})  # without any run it would be of no type
    if rows.empty:
        trained_runs(store)  # where none is complete, that is why
        raise NothingToDraw("no task was scored without single layers; sparsedepth evaluate --tasks NAME --without all")
    setting = all_runs(store).set_index("run_id")["setting"]
    rows["setting"] = (rows["run_id"].map(setting) + ", " + rows["run_id"]).fillna(short_names(rows["model"]))
    rows = rows[rows["setting"].isin(shown_settings(rows["setting"], MOST))].assign(n_seeds=1)
    kinds = [
        Panel(key=key, title=escaped(key), x_label="layer left out", y_label="lost without the layer")
        for key in rows["panel"].unique()
    ]
    return lines_drawing(rows, kinds, " Intervals, also in the data: 95%, over a task's documents.")


def _page(rows: pd.DataFrame, needed: str, n_without: int) -> Figure:
    """Blocks needed against blocks there, a colour and marker for each family; hollow where weights are below fp32."""
    page, (axis,) = panels(1, 1, 6.0, 4.6)
    families = sorted(rows["family"].fillna("?").unique())
    looks = dict(zip(families, cycle([(colour, marker) for marker in MARKERS for colour, *_ in SERIES])))
    bars = ((rows[f"{needed}_{end}"].astype(float) - rows[needed]).abs() for end in ("lo", "hi"))
    for row, *ends in zip(rows.to_dict("records"), *bars, strict=True):
        colour, marker = looks[row["family"] or "?"]
        look = {"color": colour, "markerfacecolor": colour if row["weights_dtype"] == "float32" else "white"}
        axis.errorbar(row["n_layers"], row[needed], [[end] for end in ends], fmt=marker, linewidth=1, **look)
    rows = rows.assign(name=short_names(rows["model"]))
    for place, at_one in rows.groupby(["n_layers", needed]) if len(rows) <= MOST_NAMES else ():
        axis.annotate(escaped(", ".join(at_one["name"])), place, xytext=(5, 3), textcoords="offset points", fontsize=7)
    most = 1.05 * rows["n_layers"].max()
    axis.plot([0, most], [0, most], color=GREY, linewidth=0.8, linestyle=(0, (4, 3)))
    axis.set(xlabel="layers", ylabel=axis_label(needed), xlim=(0, most), ylim=(-0.02 * most, most))
    dot = partial(Line2D, [], [], linestyle="")
    legend_above(page, [dot(color=colour, marker=marker, label=name) for name, (colour, marker) in looks.items()])
    caption(page, models_caption(needed, len(rows), n_without, rows["text"].nunique(dropna=False)))
    return page
