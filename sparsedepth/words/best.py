"""The ranking of configurations (`store.best`)."""

from typing import TYPE_CHECKING, Any

from sparsedepth import quantities
from sparsedepth.words.degeneracy import caution, degeneracy_text, weakness_text
from sparsedepth.words.differences import baseline_text, cost_text, data_text, depth_text, setting_label
from sparsedepth.words.effects import in_brackets
from sparsedepth.words.plain_text import commas, counted, in_shell, wrapped
from sparsedepth.words.runs import import_note, layers_hint, search_text, version_text
from sparsedepth.words.table import fitted_table
from sparsedepth.words.values import number_text

if TYPE_CHECKING:
    from sparsedepth.config.sweep import SweepDefinition
    from sparsedepth.store.best import Ranked, Ranking
    from sparsedepth.store.setting import Settings


def heading(ranking: "Ranking") -> str:
    """What the table shows, and warnings."""
    columns = ranking.table.columns
    quantity = quantities.rankable(ranking.by)
    search = ranking.search
    diverged = ""
    if ranking.n_diverged:
        diverged = f", {ranking.n_diverged} diverged; configurations with a diverged run rank last, by the others"
    interval = f"(an interval needs {ranking.n_for_interval} seeds)"
    advice = ""
    if ends := [(row["lo"], row["hi"]) for row in ranking.table.records() if row["lo"] is not None]:
        bounds = [f"{bound:g}" for bound in quantity.range if any(bound in end and end[0] != end[1] for end in ends)]
        cut = f", cut at {' and '.join(bounds)}" if bounds else ""
        interval = f"with 95% interval (Student's{cut})"
    if search:
        folder = in_shell(*ranking.roots)
        advice = (
            f"\nto run these again with new seeds:\n  sparsedepth best {folder} --top {min(3, ranking.n_cells)} "
            f"--again again.yaml && sparsedepth sweep again.yaml -o {folder}-again"
        )
    depths = " of all depths (--depth N for one)" if "n_layers" in columns and not search else ""
    n_shown = len(ranking.table.rows)
    more = f" (top {ranking.top} and {'the front' if search else ranking.differences.baseline.model or 'the baseline'})"
    part = f", {n_shown} shown{more if n_shown > ranking.top else ''}" if n_shown < ranking.n_cells else ""
    lines = (
        search_text(search) if search else "",
        f"{ranking.by}{in_brackets(quantity.unit)}, {quantity.better}er is better, mean over seeds {interval}:",
        f"{counted(ranking.n_cells, 'configuration')}{depths}{part}, {counted(ranking.n_runs, 'run')}{diverged}",
        cost_text(ranking.differences, columns),
        "" if search else baseline_text(ranking.differences),
        "means of runs at the lr that tuning chose; `effects` compares fitted values, at the best lr of each curve"
        if ranking.differences and "lr" in ranking.differences.tuned
        else "",
        cautions(ranking),
    )
    return f"{wrapped(filter(None, lines)).rstrip()}{advice}"


def cautions(ranking: "Ranking") -> str:
    """Warnings about the scores, the data and package versions; empty where there are none."""
    weakness = weakness_text(ranking.weakness)
    notes = (
        import_note(ranking.imported),
        f"no evidence about depth: {weakness}" if weakness else "",
        degenerate_text(ranking),
        layers_hint(ranking.by),
        version_text(ranking.versions),
    )
    parts = (depth_text(ranking.differences), "; ".join(filter(None, notes)), data_text(ranking.differences))
    return "\n".join(filter(None, parts))


def degenerate_text(ranking: "Ranking") -> str:
    """Which of its scores are degenerate, and the form that ranks in place; empty where none is."""
    return "; ".join(filter(None, (caution(ranking.form, "ranked by"), *map(degeneracy_text, ranking.judged))))


def answer(ranking: "Ranking") -> str:
    """Heading, table, and the commands that test differences, which ranks do not."""
    page = f"{heading(ranking)}\n{ranking_table(ranking)}\n"
    is_measured = all(row.get("model") for row in ranking.table.records())
    if ranking.search or ranking.n_cells == 1 or is_measured:  # a search's heading has its own advice
        return page
    folders = in_shell(*ranking.roots)
    advice = (
        f"to test differences over shared seeds: `sparsedepth effects {folders}`; "
        f"to choose what to train: `sparsedepth recipe {folders}`"
    )
    return page + wrapped([advice])


def ranking_table(ranking: "Ranking", width: int | None = None) -> str:
    """The ranking for a terminal, a line per configuration, with what differs from the baseline."""
    tuned = ranking.differences.tuned
    note = ["note"] if ranking.search else []
    values = ("seeds", "diverged", ranking.by, "lo", "hi", *ranking.beside)
    wanted = ("rank", "cell_id", "source", "n_layers", *tuned, *values, "params", "flops", *note)
    names = [name for name in dict.fromkeys(wanted) if name in ranking.table.columns]
    sources = {str(root): root.name for root in ranking.roots}
    if len(set(sources.values())) < len(sources):
        sources = {}

    def shown(name: str, value: Any) -> Any:
        if name == "source":
            return commas(sources.get(source, source) for source in value.split(", "))
        return number_text(value) if name in tuned else value

    table = ranking.table.from_columns(
        {
            **{"mean" if name == ranking.by else name: [
                shown(name, row[name]) for row in ranking.table.records()
            ] for name in names},
            "setting": ranking.settings,
        }
    )  # fmt: skip
    return fitted_table(table, ("cell_id", "params"), width, len(table.rows)).text


def row_label(cell: "Ranked", settings: "Settings", search: "SweepDefinition | None") -> str:
    """The label of a cell, with remarks in brackets; in a search the value on every axis."""
    if search:
        return commas(f"{name}={number_text(cell.knobs[name])}" for name in search.varied if name != "n_layers")
    label = cell.model or setting_label(settings, cell.knobs)
    remarks = ["tuned to the edge"] if cell.tuning == "edge" else []
    remarks += [] if cell.values else ["no value"]
    return f"{label} ({commas(remarks)})" if remarks else label
