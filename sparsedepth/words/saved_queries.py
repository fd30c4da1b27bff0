"""The answer to a saved query, below its question (`store.saved_queries`)."""

from collections import defaultdict
from typing import TYPE_CHECKING

from sparsedepth.words.degeneracy import caution
from sparsedepth.words.differences import baseline_text, cost_text, data_text, depth_text, only_tuning_text
from sparsedepth.words.plain_text import commas, counted, wrapped
from sparsedepth.words.table import fitted_table

if TYPE_CHECKING:
    from sparsedepth.store.saved_queries import Answered


def answer_text(found: "Answered") -> str:
    """One column says how a configuration differs from the baseline."""
    query = found.query
    settings = found.settings
    if not found.shown.rows:
        none = only_tuning_text(found.only_tuning) or query.none
        return f"{wrapped([query.asks])}none: {none if found.has_runs else 'there is no complete run'}"
    table = fitted_table(found.shown, found.optional, max_rows=query.max_rows)
    remarks = [query.asks, query.explains, *_degenerate(found), *map(caution, found.scores)]
    if settings:
        if "lo" in table.columns:
            is_cut = any(row["lo"] == 0 for row in found.result.records())
            remarks.append(f"lo, hi: Student's 95% interval over seeds{', cut at 0' * is_cut}")
        elif "lo" in found.result.columns:
            remarks.append(f"an interval needs {query.n_for_interval} seeds")
        remarks += [
            cost_text(settings, table.columns),
            baseline_text(settings) if "setting" in table.columns else "",
            depth_text(settings),
            data_text(settings) if query.ranks else "",
        ]
    n_forms = len(found.result.rows) - len(found.shown.rows)
    more = f"\nand {counted(n_forms, 'form')} of these scores by depth, in csv or json" if n_forms else ""
    return f"{wrapped(filter(None, remarks))}{table.text}{more}"


def _degenerate(found: "Answered") -> list[str]:
    """'degenerate (0 in every run): usefulness', a line per reason, of an answer with that column."""
    named = defaultdict[str, list[str]](list)
    shown = {row[0] for row in found.shown.rows}
    for row in found.result.records():
        if row.get("degenerate") and row["quantity"] in shown:
            named[row["degenerate"]].append(row["quantity"])
    return [f"degenerate ({why}): {commas(names)}" for why, names in named.items()]
