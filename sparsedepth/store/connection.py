"""SQL over results: the views `runs`, `curves`, `layers`, `heads`, `pairs`, `tokens`, `difficulty`, and `evals` (scores
of lm-evaluation-harness).

The database is in memory and safe for untrusted queries: its rows are handed to DuckDB as Arrow data, then access to
files, network and extensions is switched off and the configuration locked. A query is one SELECT (or DESCRIBE,
SUMMARIZE, SHOW), calls only a few harmless table functions, runs in a read-only transaction, and has limits of time,
memory and rows (`store.fences`)."""

import re
import warnings
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain, product
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import duckdb
import pyarrow as pa

from sparsedepth.config.role import fields_where
from sparsedepth.config.run import CELL_FIELDS, RunConfig
from sparsedepth.quantities import IN_RUNS, TASK_SCORE
from sparsedepth.quantities.measured import MEASURES
from sparsedepth.quantities.quantity import WATCHED, Named, Row, Table
from sparsedepth.store.cache import load
from sparsedepth.store.checksums import DamagedRun
from sparsedepth.store.evals import COLUMNS as EVAL_COLUMNS, TASK_SCORES, read_evals
from sparsedepth.store.fences import FENCES, NARROW, lock, read_only, refuse_functions, stoppable, syntax_nodes
from sparsedepth.store.made_with import plugins_of
from sparsedepth.store.packs import Part, find_runs, no_run, read_file
from sparsedepth.store.parquet import arrow_schema, empty_table, rows_table
from sparsedepth.store.query_result import QueryResult
from sparsedepth.store.run_record import RUNS, parse_object
from sparsedepth.store.schema import COLUMNS, METRICS, SOURCE, TABLES, TUNING_COLUMNS
from sparsedepth.store.stored_rows import MARKER_COLUMNS, LazyTable, UnreadTable, view_schema
from sparsedepth.store.tuning_roles import IS_TRAINED, earlier_points, read_tuning, tuning_columns
from sparsedepth.words.plain_text import database_line, utf8, visible
from sparsedepth.words.runs import damage_text

if TYPE_CHECKING:
    import pandas as pd

TIME_LIMIT = 60.0
MAX_ANSWER_ROWS = 1_000_000
MAX_FRAME_ROWS = 20_000_000
MAX_QUERY_LENGTH = 100_000
TABLE_FUNCTIONS = frozenset({"range", "generate_series", "unnest", "json_each"})
"""Table functions a query may call. Others read files, run unchecked SQL, or change settings."""

_INTERNAL_TABLES = re.compile(r"pg_|duckdb_|pragma_|sqlite_")
"""The database's internal functions and tables, of settings (which may hold paths of this machine) and logs."""

_LIST_TABLES = re.compile(r"\s*(show|describe|show( all)? tables)[\s;]*", re.IGNORECASE)
"""Answered with the views: the database would also list the tables that they are made of."""

Fetched = TypeVar("Fetched")


@dataclass(eq=False)
class Store(AbstractContextManager["Store"]):
    """Complete runs, open for queries. Close it, or use it in a `with`."""

    _connection: duckdb.DuckDBPyConnection
    _cached: dict[str, LazyTable]
    _folders: Mapping[Path, set[str]]
    """Of runs -> their run_ids, until TUNING_COLUMNS are added at the first query of `runs`."""
    time_limit: float
    """Seconds per query."""
    roots: tuple[Path, ...]
    """The folders it was opened with."""
    damaged: tuple[DamagedRun, ...]
    """Damaged runs, which were left out."""
    _earlier: Mapping[str, Named]
    """run_id -> its role, of points of watched trainings that are not compared."""

    def __post_init__(self) -> None:
        self.close = weakref.finalize(self, self._connection.close)

    def __exit__(self, *error: object) -> None:
        self.close()

    def sql(self, text: str, max_rows: int = MAX_ANSWER_ROWS) -> QueryResult:
        """The answer to one SELECT. Raises ValueError, in one line, if it is invalid, forbidden or beyond a limit."""

        def fetch(cursor: duckdb.DuckDBPyConnection) -> QueryResult:
            rows = cursor.fetchmany(max_rows + 1)
            _check_rows(len(rows), max_rows)
            return QueryResult(columns=tuple(column[0] for column in cursor.description or ()), rows=tuple(rows))

        return self._run(text, fetch)

    def frame(self, text: str, max_rows: int = MAX_FRAME_ROWS) -> "pd.DataFrame":
        """The answer as a DataFrame, with NaN for NULL: integer columns with NULL become float. Raises as `sql`."""
        import pandas as pd

        def fetch(cursor: duckdb.DuckDBPyConnection) -> pd.DataFrame:
            chunks: list[pd.DataFrame] = []
            while not chunks or len(chunks[-1]):
                chunks.append(cursor.fetch_df_chunk(100))
                _check_rows(sum(map(len, chunks)), max_rows)
            return pd.concat(chunks[:-1] or chunks, ignore_index=True)

        return self._run(text, fetch)

    def condition(self, text: str) -> str:
        """An SQL condition over `runs`, safely in brackets. Raises ValueError if it is not a condition."""
        if not text.strip():
            raise ValueError("where is empty; give a condition, such as n_layers = 12")
        bracketed = f"({text}\n)"  # the line break ends a comment in the condition
        try:  # with brackets, a following GROUP BY or UNION is an error; without, an unbalanced bracket is
            for condition in (bracketed, text):
                self.sql(f"SELECT count(*) FROM runs WHERE {condition}")
        except ValueError as error:
            raise ValueError(f"where {text!r}: {error}") from None
        return bracketed

    def schema(self) -> QueryResult:
        """All columns of all views, and all values of `metric`, with type, unit and meaning."""
        views = {**COLUMNS, "runs": (*COLUMNS["runs"], SOURCE, *TUNING_COLUMNS), "evals": EVAL_COLUMNS}
        described = [(column.view, column.name, column) for column in chain.from_iterable(views.values())]
        described += [(view, f"metric = '{each.name}'", each) for view, metrics in METRICS.items() for each in metrics]
        rows = tuple((view, name, each.type, each.unit, each.meaning) for view, name, each in described)
        scores = [name for name in self.sql("SELECT * FROM runs LIMIT 0").columns if name.startswith(TASK_SCORE)]
        rows += tuple(("runs", name, "DOUBLE", IN_RUNS[name].unit, IN_RUNS[name].formula) for name in scores)
        return QueryResult(columns=("view", "name", "type", "unit", "meaning"), rows=rows)

    def _run(self, text: str, fetch: Callable[[duckdb.DuckDBPyConnection], Fetched]) -> Fetched:
        connection = self._connection
        try:
            statement, tables = _only_select(connection, text)
            for name in [name for name in self._cached if {name, name.partition("_")[0]} & tables]:
                connection.register(name, self._cached[name].dataset())  # in place of an empty table
                del self._cached[name]  # only now: reading may fail, and is then tried again
            if self._folders and "runs" in tables:
                folders = self._folders
                self._folders = {}  # its own queries are of `runs`, too
                try:
                    self._add_tuning(folders)
                except BaseException:  # Ctrl-C, or the limit of time: the next query tries again
                    self._folders = folders
                    raise
            with read_only(connection):
                return stoppable(connection, self.time_limit, lambda: fetch(connection.execute(statement)))
        except duckdb.InterruptException:
            raise ValueError(f"the query was stopped after {self.time_limit:g} s; {NARROW}") from None
        except duckdb.OutOfMemoryException:  # DuckDB proposes settings, which are locked
            raise ValueError(f"the query needs more memory than {FENCES['memory_limit']}; {NARROW}") from None
        except duckdb.Error as error:
            raise ValueError(_explain(error, text)) from None
        except (UnicodeError, OverflowError, RecursionError) as error:
            raise ValueError(f"the query cannot be run: {error}") from None

    def _add_tuning(self, folders: Mapping[Path, set[str]]) -> None:
        """Add TUNING_COLUMNS to `runs`, computed from the runs of each results folder."""
        columns: dict[str, Named] = {}
        cells: dict[str, Named] = {}
        for folder in sorted(folder for folder in folders if folder.name == RUNS):
            try:
                tuning = read_tuning(folder.parent)
            except ValueError as error:
                warnings.warn(f"{error}: its runs have no `tuning`", stacklevel=2)
                continue
            if tuning is None:
                continue
            sql = f"SELECT DISTINCT ON (cell_id) cell_id, {', '.join(CELL_FIELDS)} FROM runs WHERE {IS_TRAINED}"
            cells = cells or {cell["cell_id"]: cell for cell in self.sql(sql).records()}
            sql = f"SELECT run_id, cell_id, seed, outcome, {tuning.objective} FROM runs WHERE {IS_TRAINED}"
            runs = [run for run in self.sql(sql).records() if run["run_id"] in folders[folder]]
            columns |= tuning_columns(tuning, [cells[run["cell_id"]] | run for run in runs])
        columns |= self._earlier
        if columns:
            schema = arrow_schema((COLUMNS["runs"][0], *TUNING_COLUMNS))  # the first is run_id
            self._connection.register("tuning", rows_table([*columns.values()], schema))
            self._connection.execute(
                "CREATE OR REPLACE VIEW runs AS SELECT * FROM every_run LEFT JOIN tuning USING (run_id)"
            )

    def read_tables(self) -> None:
        """Read all unread tables now, and cache them. Raises DamagedRun."""
        for rows in self._cached.values():
            if isinstance(rows, UnreadTable):
                rows.read()


def open_store(*paths: Path | str, time_limit: float = TIME_LIMIT, skip_damaged: bool = False) -> Store:
    """Open the complete runs of results folders, folders of run folders, or single run folders, as one store.

    Copies of a run count once. `time_limit` is in seconds per query. Raises ValueError if there is no complete run or
    evaluation, or two runs with the same run_id differ; DamagedRun if a file fails its checksum. With
    `skip_damaged`, damaged runs are left out with a warning."""
    damaged: list[DamagedRun] | None = [] if skip_damaged else None
    roots = [*dict.fromkeys(map(Path, paths))]
    parts = find_runs(roots, damaged)
    inside = (run.folder.parent.parent for part in parts for run in part.runs if run.folder != part.root)
    evals = read_evals(dict.fromkeys([*roots, *inside]), damaged)
    if not parts and not len(evals):
        raise no_run(roots)
    connection = duckdb.connect(":memory:", config=FENCES)
    try:
        cached = _make_views(connection, parts or [Part(root=roots[0], runs=[])], damaged)
        connection.register("evals", evals)
        if len(evals):
            connection.execute(TASK_SCORES)
            connection.execute("ALTER VIEW every_run RENAME TO stored_run")
            connection.execute("CREATE VIEW every_run AS SELECT * FROM stored_run LEFT JOIN task_scores USING (run_id)")
        lock(connection)
    except BaseException:
        connection.close()
        raise
    folders = defaultdict[Path, set[str]](set)
    for part in parts:
        root = part.root.resolve()  # the folder `runs` may be named by a link, or '.'
        for run in part.runs:
            folders[(root / run.place).parent].add(run.run_id)
    store = Store(connection, cached, folders, time_limit, tuple(roots), tuple(damaged or ()), {})
    if damaged:
        warnings.warn(damage_text(damaged), stacklevel=2)
    nulls = ", ".join(f"NULL::{column.type} AS {column.name}" for column in TUNING_COLUMNS)
    connection.execute(f"CREATE VIEW runs AS SELECT *, {nulls} FROM every_run")
    if len({folder.parent for folder in folders}) > 1:
        _warn_of_other_texts(store)
    marked = store.sql(_MARKED).records()
    _warn_of_other_tokens(row for row in marked if row["model"] is not None)
    _warn_of_plugins(row["plugins"] for row in marked)
    if any(row["origin"] == WATCHED for row in marked):
        store._earlier = earlier_points(store.sql(_POINTS).records())
    return store


_PLACES = pa.schema([("folder", pa.string()), (SOURCE.name, pa.string())])


def _runs_of(part: Part, runs: pa.Table, copies: Collection[str]) -> pa.Table:
    """The rows of `runs` of a part but for these copies, with its root: it is the `source`, and joined to `folder`,
    which is '.' for a run as root."""
    if copies:
        is_own_N = [run_id not in copies for run_id in runs["run_id"].to_pylist()]
        runs = runs.filter(pa.array(is_own_N))  # slow to start, and rare
    root = utf8(str(part.root))
    inside_N = [root if folder == "." else f"{root}/{folder}" for folder in runs["folder"].to_pylist()]
    places = rows_table([{"folder": inside, SOURCE.name: root} for inside in inside_N], _PLACES)
    runs = runs.drop_columns([*MARKER_COLUMNS])
    runs = runs.set_column(runs.schema.get_field_index("folder"), "folder", places["folder"])
    return runs.append_column(SOURCE.name, places[SOURCE.name])


def _make_views(
    connection: duckdb.DuckDBPyConnection, parts: Sequence[Part], damaged: list[DamagedRun] | None
) -> dict[str, LazyTable]:
    """Make each view over its rows in all parts, a run that several have from the first that is undamaged, with empty
    placeholders for lazy tables; these, by the name to register."""
    cached: dict[str, LazyTable] = {}
    selects: dict[Table, list[str]] = {table: [] for table in TABLES}
    runs_of_parts: list[pa.Table] = []

    seen: set[str] = set()
    for part in parts:
        run_ids = {run.run_id for run in part.runs}
        copies = run_ids & seen
        if run_ids and copies == run_ids:
            continue
        loaded = load(part, damaged)
        runs_of_parts.append(_runs_of(part, pa.concat_tables([rows.runs for rows in loaded]), copies))
        seen.update(runs_of_parts[-1]["run_id"].to_pylist())
        for rows, table in product(loaded, TABLES):
            name, found = f"{table}_{len(selects[table])}", rows.tables[table]
            if not isinstance(found, pa.Table):
                cached[name] = found
                found = empty_table(view_schema(table))
            connection.register(name, found)
            left_out = ", ".join(f"'{run_id}'" for run_id in sorted(copies | rows.left_out))  # checked: hex digits
            selects[table].append(f"SELECT * FROM {name}" + (f" WHERE run_id NOT IN ({left_out})" if left_out else ""))
    # One table of all parts: a statement binds its columns in 6 ms, those of seven in 50. `_add_tuning` makes `runs`.
    connection.register("runs_0", pa.concat_tables(runs_of_parts))
    connection.execute("CREATE VIEW every_run AS SELECT * FROM runs_0")
    for table, selects_of_table in selects.items():
        connection.execute(f"CREATE VIEW {table} AS " + " UNION ALL ".join(selects_of_table))
    return cached


# What makes losses incomparable: `data_hash` in the manifest is the hash of the tokens.

_STATED = fields_where(RunConfig, lambda role: role.kind not in ("record", "measure"))
_MARKED = f"""
SELECT folder, model, plugins, origin FROM every_run
WHERE model IS NOT NULL OR plugins IS NOT NULL OR origin = '{WATCHED}'
"""
"""Runs that a look at the store has to tell of."""
_POINTS = f"""
SELECT run_id, cluster || hash({", ".join(name for name in _STATED if name != "train_tokens")}) AS training,
    n_layers, steps, tokens_trained FROM every_run WHERE origin = '{WATCHED}'
"""
"""A watched training is its name and what is known of it: another folder may have another of the name."""
_DATA_FIELDS = fields_where(RunConfig, lambda role: role.kind == "data")
_ONE_RUN_PER_TEXT = f"""
SELECT corpus, min(folder), regexp_replace(folder, '/[^/]*/[^/]*$', ''), {", ".join(_DATA_FIELDS)},
    if(tokenizer LIKE 'bpe:%', start_weights, NULL) -- whose model learned the tokenizer
FROM every_run WHERE {IS_TRAINED} AND origin IS NULL AND corpus NOT LIKE 'task:%' GROUP BY ALL ORDER BY 2
"""
"""For each text and results folder."""


def _warn_of_other_texts(store: Store) -> None:
    """Warn of a text that differs between results folders: a run's fields name it by a path, which each may fill."""
    folders = defaultdict[tuple, dict[str, str]](dict)
    for corpus, run, results, *fields in store.sql(_ONE_RUN_PER_TEXT).rows:
        folders[corpus, *fields][results] = run
    for (corpus, *_), runs in folders.items():
        hashes = {_data_hash(Path(run)): results for results, run in runs.items()} if len(runs) > 1 else {}
        hashes.pop(None, None)
        if len(hashes) > 1:
            first, *others = hashes.values()
            warnings.warn(
                f"corpus={corpus!r} is another text in {first} than in {', '.join(others)} (data_hash of their "
                f"runs): losses cannot be compared between them, even of equal configurations",
                stacklevel=3,
            )


def _warn_of_other_tokens(models: Iterable[Row]) -> None:
    """Warn of models that were measured on different tokens; their facts do not name these."""
    by_hash: dict[str | None, str] = {}
    for folder, model in sorted((Path(row["folder"]), row["model"]) for row in models):
        by_hash.setdefault(_data_hash(folder), f"{model} ({folder})")
    by_hash.pop(None, None)
    if len(by_hash) > 1:
        warnings.warn(
            f"measured models read different tokens, such as {' and '.join([*by_hash.values()][:2])}: their losses and "
            f"scores cannot be compared; measure them again with the same --data or --tokens",
            stacklevel=3,
        )


def _warn_of_plugins(made: Iterable[str | None]) -> None:
    """Warn of measures of plugins that are not loaded here, or whose code is not the same in all runs."""
    for measure, by in plugins_of(made).items():
        files, codes = (sorted({*part}) for part in zip(*by, strict=True))
        if measure not in {each.name for each in MEASURES}:
            told = f"{measure} was measured by a plugin that is not loaded; name its file: --plugin {files[0]}"
            warnings.warn(visible(told), stacklevel=3)
        elif len(codes) > 1:
            told = f"the plugin {files[0]} measured {measure} with different code ({', '.join(codes)})"
            warnings.warn(visible(f"{told}: these numbers cannot be compared"), stacklevel=3)


def _data_hash(run: Path) -> str | None:
    try:
        return parse_object(run, "manifest.json", read_file(run, "manifest.json")).get("data_hash")
    except (OSError, ValueError):  # removed meanwhile
        return None


# Checks and limits of one query


def _only_select(connection: duckdb.DuckDBPyConnection, text: str) -> tuple[duckdb.Statement, set[str]]:
    """The single read-only statement in `text`, and the tables that it names. Raises ValueError."""
    if len(text) > MAX_QUERY_LENGTH:
        raise ValueError(f"the query has {len(text):,} characters; at most {MAX_QUERY_LENGTH:,} are read")
    if _LIST_TABLES.fullmatch(text):
        text = f"SELECT unnest({[*COLUMNS, 'evals']}) AS name"
    text.encode()  # raises a UnicodeError that names the place; DuckDB's does not
    statements = connection.extract_statements(text)
    if len(statements) != 1:
        raise ValueError(f"a query is one SELECT statement, and this text holds {len(statements)} statements")
    (statement,) = statements
    if statement.type == duckdb.StatementType.MULTI:
        raise ValueError(
            "PIVOT needs its values spelled out here: FROM layers PIVOT (avg(value) FOR metric IN ('a', 'b'))"
        )
    if statement.type != duckdb.StatementType.SELECT:
        raise ValueError(f"only SELECT, DESCRIBE, SUMMARIZE and SHOW are allowed here, not {statement.type.name}")
    tables = set()
    nodes = syntax_nodes(connection, statement.query)
    for node in reversed(nodes):
        table = str(node.get("table_name")).lower()
        tables.add(table)
        if node.get("schema_name", "") not in ("", "main") or _INTERNAL_TABLES.match(table):
            raise ValueError(f"the table {table!r} is internal to the database, and not allowed here; query the views")
        if node.get("type") == "TABLE_FUNCTION":
            function = str(node["function"].get("function_name")).lower()
            if function not in TABLE_FUNCTIONS:
                raise ValueError(
                    f"the table function {function!r} is not allowed here; query the views "
                    f"{', '.join((*COLUMNS, 'evals'))} (and {', '.join(sorted(TABLE_FUNCTIONS))})"
                )
    refuse_functions(nodes, TABLE_FUNCTIONS)
    return statement, tables


def _check_rows(n_rows: int, max_rows: int) -> None:
    if n_rows > max_rows:
        raise ValueError(f"the answer has more than {max_rows:,} rows; add LIMIT, or aggregate")


def _explain(error: duckdb.Error, query: str) -> str:
    """DuckDB's message in one line, with the names it proposes; of a value without quotes, the value in quotes."""
    message = re.sub(r"^\w+ Error: ", "", database_line(error))
    if message.startswith("Table with name"):
        message += f" Views: {', '.join((*COLUMNS, 'evals'))}"
    if found := re.match(r'Referenced column "(.+?)" not found', message):
        name = value = found[1]
        if re.search(rf'(=|<>|\blike\b|\bin *\(([^)]*,)?) *"?{re.escape(name)}\b', query, re.IGNORECASE):
            if f"'{name.lower()}'" in str(RunConfig.model_json_schema()):
                value = name.lower()
            return f"no column is called {name!r}; a text stands in single quotes: write '{value}'"
        if name == "preset":
            return "no column is called 'preset', the name of a remedy's fields: name one of them (`presets NAME`)"
        message += "; all columns: `query DIR --schema`"
    if message.startswith("unterminated"):
        message += "; inside a text write a quote as two quotes: 'it''s'"
    return message[:600]
