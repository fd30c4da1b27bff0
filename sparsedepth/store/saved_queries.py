"""Saved questions, which every sweep raises: each has a name, a sentence, and the SQL that answers it.

A *cell* is all fields of a run but the seed; its numbers are means over the finished seeds, `sd` their standard
deviation. Only results count (`store.tuning_roles`), except in `lr_curves`, which also needs the rejected values.
In the SQL {varying} stands for the fields that vary in the store, {others} for these without lr, {loss} for the loss
that compares its runs (`store.comparable_loss`), {scores} for the scores of depth, each in its sound form
(`store.degeneracy`). Signal-to-noise and the questions on effects are no SQL."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from sparsedepth.quantities.measured import EQUAL_RISE
from sparsedepth.quantities.quantity import WATCHED
from sparsedepth.store import signal_to_noise
from sparsedepth.store.comparable_loss import loss_in
from sparsedepth.store.connection import Store
from sparsedepth.store.degeneracy import UsableForm, columns_for, usable_form
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.search import MATCHED
from sparsedepth.store.setting import Progress, Settings, only_tuning, read_settings, with_setting_column
from sparsedepth.store.small_sample import MIN_VALUES, mean_interval
from sparsedepth.store.tuning_roles import CHOSEN_ROLES, IS_POINT, IS_RESULT, IS_TRAINED
from sparsedepth.words.plain_text import did_you_mean

FROM_EFFECTS = {
    "variance": "does a setting lower residual variance, and raise sparsity and usefulness?",
    "depth": "do deeper layers earn their cost, at equal tokens and at equal FLOPs?",
}
"""Further questions, answered by `sparsedepth.report.answers` from the frame of effects."""
SIGNAL_TO_NOISE = "signal_to_noise"


@dataclass(frozen=True, kw_only=True)
class SavedQuery:
    asks: str
    sql: str
    none: str = "no run was trained to the end"
    """Why there is no row, if there are runs."""
    optional: tuple[str, ...] = ("cell_id", "run_id")
    """Columns that a narrow terminal leaves out, the least important first; files have all."""
    scores: tuple[str, ...] = ()
    """Scores of depth that it shows."""
    ranks: bool = False
    """Whether it compares configurations by their loss."""
    explains: str = ""
    """Its columns."""
    max_rows: int = 200
    """In a terminal."""
    n_for_interval: ClassVar[int] = MIN_VALUES
    """Seeds that an interval needs."""


def _mean(name: str) -> str:
    return f"avg({name}) FILTER (outcome = 'ok') AS {name}"


_MEANS = ("weight_sparsity", "attention_sparsity_rel", "residual_variance_last", "train_flops", "params_total")
_CELLS = f"""
    WITH by_seed AS ( -- the mean of runs that share a seed, as `small_sample.seed_means`
        SELECT cell_id, {{cell_fields}} coalesce(CAST(seed AS VARCHAR), run_id) AS unit,
            count(*) FILTER (outcome = 'diverged') AS diverged, {{seed_means}} {", ".join(map(_mean, _MEANS))}
        FROM runs WHERE {IS_RESULT} GROUP BY ALL
    ), cells AS (
        SELECT cell_id, {{cell_fields}} count({{loss}}) AS seeds, CAST(sum(diverged) AS BIGINT) AS diverged,
            list({{loss}} ORDER BY unit) FILTER ({{loss}} IS NOT NULL) AS losses,
            {{means}} {", ".join(f"avg({name}) AS {name}" for name in _MEANS)}
        FROM by_seed GROUP BY ALL
    )
"""

QUESTIONS: dict[str, SavedQuery] = {
    "best_per_depth": SavedQuery(
        optional=("cell_id", "{scores}"),
        asks="which configuration has the lowest mean loss at each n_layers, without diverged seeds?",
        none="no configuration has a loss and no diverged seed",
        scores=("usefulness",),
        ranks=True,
        sql=_CELLS + "SELECT n_layers, cell_id, {varying} seeds, {loss}, losses, {scores} params_total, train_flops"
        " FROM cells"
        " WHERE diverged = 0 AND {loss} IS NOT NULL"
        " QUALIFY row_number() OVER (PARTITION BY n_layers ORDER BY {loss}, cell_id) = 1 ORDER BY n_layers",
    ),
    "pareto": SavedQuery(
        optional=("cell_id", "params"),
        scores=("usefulness",),
        ranks=True,
        asks="which configurations are Pareto-optimal in loss, usefulness and train_flops?",
        none="no configuration has a loss, usefulness (sparsedepth measure), train_flops and no diverged seed",
        sql=_CELLS + "SELECT cell_id, n_layers, {varying} seeds, {loss}, {scores} params_total, train_flops"
        " FROM cells AS this"
        " WHERE diverged = 0 AND {loss} IS NOT NULL AND {score} IS NOT NULL AND NOT EXISTS ("
        "   FROM cells AS other WHERE other.diverged = 0 AND other.{loss} <= this.{loss}"
        f"   AND other.{{score}} >= this.{{score}} AND other.train_flops <= {1 + MATCHED} * this.train_flops"
        "   AND (other.{loss} < this.{loss} OR other.{score} > this.{score}"
        f"        OR other.train_flops < {1 - MATCHED} * this.train_flops))"  # as `store.search.on_front`
        " ORDER BY train_flops, {loss}, cell_id",
    ),
    "diverged": SavedQuery(
        asks="which runs diverged, when, and why?",
        none="every run trained to the end",
        sql="SELECT run_id, n_layers, {varying} seed, diverged_step, steps, diverged_cause FROM runs"
        " WHERE outcome = 'diverged' ORDER BY n_layers, cell_id, seed",
    ),
    "lr_curves": SavedQuery(
        asks="how does the loss of each configuration depend on lr, and is the best lr (or the one that tuning "
        "chose) inside the range tried?",
        none="no configuration was run at two values of lr",
        sql="WITH choosing AS (SELECT DISTINCT seed FROM runs WHERE tuning = 'tuning'),"
        " by_seed AS (SELECT n_layers, {others} lr, seed, if(seed IS NULL, run_id, '') AS unit, count(*) AS n,"
        " count(*) FILTER (outcome = 'diverged') AS diverged, avg({loss}) FILTER (outcome = 'ok') AS {loss},"
        f" bool_or(coalesce(tuning, '') IN {CHOSEN_ROLES}) AS is_chosen"
        f" FROM runs WHERE {IS_TRAINED} AND {IS_POINT} GROUP BY ALL),"
        " points AS (SELECT n_layers, {others} lr, CAST(sum(n) AS BIGINT) AS runs,"
        " CAST(sum(diverged) AS BIGINT) AS diverged,"
        " avg({loss}) FILTER (seed IN (FROM choosing)) AS {loss}_tuning, avg({loss}) AS {loss},"
        " bool_or(is_chosen) AS is_chosen FROM by_seed GROUP BY ALL)"
        " SELECT * EXCLUDE (is_chosen), if(lr = coalesce(min(lr) FILTER (is_chosen) OVER curve,"
        "   arg_min(lr, row(if(diverged > 0 OR {loss} IS NULL, 'inf'::DOUBLE, {loss}), lr)) OVER curve),"
        "  if(bool_or(is_chosen) OVER curve, 'chosen', 'best')"
        "  || if(lr IN (min(lr) OVER curve, max(lr) OVER curve), ', at the edge', ''), NULL) AS note"
        " FROM points WINDOW curve AS (PARTITION BY n_layers, {others} 1) QUALIFY count(*) OVER curve > 1"
        " ORDER BY n_layers, {others} lr",
    ),
    "seed_noise": SavedQuery(
        optional=("cell_id", "{scores}"),
        asks="how much do loss and usefulness vary between seeds in each configuration with two or more?",
        none="no configuration has two seeds that trained to the end",
        scores=("usefulness",),
        sql=_CELLS + "SELECT cell_id, n_layers, {varying} seeds, diverged, {loss}, {loss}_sd, {scores}"
        " {score}_sd FROM cells WHERE seeds >= 2 ORDER BY {loss}_sd DESC, cell_id",
    ),
    "mechanism": SavedQuery(
        optional=("cell_id", "params", "flops", "seeds", "usefulness_loss_increase", "attention_sparsity_rel"),
        asks="what are sparsity, residual variance, usefulness and loss in every configuration?",
        scores=("usefulness", "usefulness_loss_increase"),
        sql=_CELLS + "SELECT cell_id, n_layers, {varying} seeds, diverged, weight_sparsity, attention_sparsity_rel,"
        " residual_variance_last, {scores} {loss}, params_total, train_flops FROM cells"
        " ORDER BY n_layers, {loss}, cell_id",
    ),
}


_POINTS = f"FROM runs WHERE origin = '{WATCHED}'"
QUESTIONS["trainings"] = SavedQuery(
    asks="at equal tokens, how much depth does each training of others use, at the points that all have?",
    none="no training was measured at tokens that all have (give tokens_per_step)",
    optional=("residual_variance_last", "usefulness_loss_increase", "steps", "seed"),
    explains="One run each: `effects` compares settings of several seeds a side.",
    sql="SELECT tokens_trained, steps, seed, val_loss, needed_layers, usefulness_loss_increase, causal_score,"
    f" residual_variance_last, cluster AS training {_POINTS} AND tokens_trained IN (SELECT tokens_trained {_POINTS}"
    f" GROUP BY ALL HAVING count(DISTINCT cluster) = (SELECT count(DISTINCT cluster) {_POINTS}))"
    " ORDER BY tokens_trained, cluster",
)
QUESTIONS["models"] = SavedQuery(
    asks="how much of its depth does each measured model use?",
    none="no model was measured (sparsedepth measure --models)",
    optional=(
        "packages text params_total",
        "residual_variance_last causal_score usefulness",
        "needed_layers_lo needed_layers_hi",
        "fit_per_dimension",
        "needed_equal_rise_lo needed_equal_rise_hi",
        "family",
    ),
    explains="depth_used: needed_layers / n_layers, at a rise in nat/token. needed_equal_rise, which ranks: blocks "
    f"whose replacement adds more than {EQUAL_RISE} nat/byte, alike for all tokenizers; NULL where bytes are unknown, "
    "its interval also in old records. val_loss: nat/token; loss_per_byte: nat/byte. fit_per_dimension: tokens per "
    "dimension on which maps were fitted; below 16 their own error counts. Weights below fp32 are ranked apart. Only "
    "models on one text compare, and of unlike losses the better one needs more layers.",
    sql="SELECT rank() OVER (PARTITION BY weights_dtype = 'float32' ORDER BY needed_equal_rise / n_layers DESC"
    " NULLS LAST, depth_used DESC NULLS LAST) AS rank, * FROM (SELECT model, family, params_total, n_layers,"
    " coalesce(needed_equal_rise, of_layers) AS needed_equal_rise, needed_equal_rise_lo, needed_equal_rise_hi,"
    " needed_layers, needed_layers_lo, needed_layers_hi, needed_layers / n_layers AS depth_used, val_loss,"
    " val_bits_per_byte * ln(2) AS loss_per_byte, usefulness, causal_score, residual_variance_last,"
    " fit_tokens / d_model AS fit_per_dimension, weights_dtype, text, packages FROM runs LEFT JOIN (SELECT run_id,"
    f" count(*) FILTER (added > {EQUAL_RISE} * val_loss / val_bits_per_byte / ln(2) AND lo > 0) AS of_layers"
    " FROM runs JOIN (SELECT run_id, max(value) FILTER (metric = 'affine_loss_added') AS added,"
    " max(value) FILTER (metric = 'affine_loss_added_lo') AS lo FROM layers GROUP BY run_id, step, layer)"
    " USING (run_id) WHERE needed_layers IS NOT NULL AND val_bits_per_byte IS NOT NULL GROUP BY run_id) USING (run_id)"
    " WHERE model IS NOT NULL) ORDER BY weights_dtype <> 'float32', rank, model",
)

_SIGNAL_TO_NOISE = SavedQuery(
    asks=signal_to_noise.QUESTION,
    sql=f"-- by `store.signal_to_noise`, of {IS_RESULT}",
    none="no depth has two configurations with two finished seeds each",
    optional=("hi", "lo"),
    explains=signal_to_noise.EXPLAINED,
    max_rows=50,
)


@dataclass(frozen=True, kw_only=True)
class Answered:
    """The answer to a saved query."""

    query: SavedQuery
    result: QueryResult
    shown: QueryResult
    """In a terminal: one column says how a configuration differs from the baseline."""
    optional: tuple[str, ...]
    """As those of the query."""
    settings: Settings | None
    scores: tuple[UsableForm, ...] = ()
    """The scores of depth that it shows, degenerate ones in their sound form."""
    has_runs: bool = True
    only_tuning: Progress | None = None
    """Where there is no row: how far tuning is."""


def sentences() -> dict[str, str]:
    """Name of a question that `ask` answers -> the question."""
    return {name: query.asks for name, query in QUESTIONS.items()} | {SIGNAL_TO_NOISE: signal_to_noise.QUESTION}


def ask(store: Store, name: str) -> QueryResult:
    """The rows of the answer to a saved query. Raises ValueError for an unknown name."""
    return answered(store, name).result


def answered(store: Store, name: str) -> Answered:
    """The answer to a saved query. Raises ValueError for an unknown name."""
    if name not in sentences():
        names = (*sentences(), *FROM_EFFECTS)
        hint = did_you_mean(name, names, f"the saved questions are: {', '.join(names)}")
        raise ValueError(f"no question is called {name!r}; {hint}")
    if name == SIGNAL_TO_NOISE:
        query = _SIGNAL_TO_NOISE
        settings = None
        scores = ()
        result = signal_to_noise.answer(store)
        of_all_layers = tuple(row for row in result.rows if row[0] not in signal_to_noise.FORMS)
        shown = replace(result, rows=of_all_layers).of_columns(signal_to_noise.IN_TERMINAL)
    else:
        query = QUESTIONS[name]
        settings = read_settings(store)
        rows_of = "SELECT {} FROM runs WHERE " + IS_RESULT
        scores = tuple(
            usable_form(score, store.sql(rows_of.format(", ".join(columns_for(score)))).records())
            for score in query.scores
        )
        result = _result(store, query, [*dict.fromkeys(usable.form for usable in scores)], settings)
        shown = with_setting_column(result, settings) if settings else result
    forms = " ".join(dict.fromkeys(usable.form for usable in scores))
    return Answered(
        query=query,
        result=result,
        shown=shown,
        optional=tuple(names.format(scores=forms) for names in query.optional),
        settings=settings,
        scores=scores,
        has_runs=store.sql(f"SELECT count(*) FROM runs WHERE {IS_TRAINED}").rows != ((0,),),
        only_tuning=None if result.rows or IS_RESULT not in query.sql else only_tuning(store),
    )


def _result(store: Store, query: SavedQuery, scores: Sequence[str], settings: Settings | None) -> QueryResult:
    varying = [name for name in settings.varying if name != "n_layers"] if settings else []
    loss = loss_in(store)
    shown = (loss, *scores)
    columns = {
        "varying": varying,
        "others": [field for field in varying if field != "lr"],
        "cell_fields": ["n_layers", *varying],
        "seed_means": [*map(_mean, shown)],
        "means": [f"avg({name}) AS {name}, stddev_samp({name}) AS {name}_sd" for name in shown],
        "scores": scores,
    }
    listed = {name: "".join(f"{column}, " for column in names) for name, names in columns.items()}
    answer = store.sql(query.sql.format(**listed, score=next(iter(scores), ""), loss=loss))
    return _with_interval(answer) if "losses" in answer.columns else answer


def _with_interval(answer: QueryResult) -> QueryResult:
    """The column `losses`, one per seed, replaced by the ends of their mean's interval, from 0 on."""
    columns = {}
    for name, values in zip(answer.columns, answer.values(), strict=True):
        if name != "losses":
            columns[name] = values
            continue
        ends = [mean_interval(losses)[1:] for losses in values]
        columns |= {"lo": [None if lo is None else max(lo, 0.0) for lo, _ in ends], "hi": [hi for _, hi in ends]}
    return QueryResult.from_columns(columns)
