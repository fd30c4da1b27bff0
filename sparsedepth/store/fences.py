"""Fences around untrusted SQL: no files, no network, limits of time and memory; the syntax tree of a statement.

DuckDB stops a query at its own limits between batches of rows. A call that builds one huge value, such as
repeat('x', 4000000000), or range(3000000000) as a list, passes both. So a process of one query, such as a command, is
`limited` itself:

    memory   at most MEMORY bytes of address space beyond what the open store needs (Linux); then the query fails
    time     GRACE seconds after the query's own time limit the process ends, with exit code 2 and a line on stderr
"""

import functools
import json
import os
import re
import resource
import sys
import threading
from collections.abc import Callable, Collection, Generator, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from typing import TypeVar

import duckdb

from sparsedepth.outside import limit_addresses
from sparsedepth.quantities.quantity import Named

Result = TypeVar("Result")

FENCES: Named = {
    "autoinstall_known_extensions": False,
    "autoload_known_extensions": False,
    "allow_community_extensions": False,
    "python_enable_replacements": False,  # otherwise FROM x would read Python's local variable x
    "temp_directory": "",  # otherwise a large sort would write to the current folder
    "memory_limit": "2GB",
}
_FUNCTIONS = r"""
!= !__postfix !~~ !~~* % & && * ** + - ->> / // < <-> << <= <=> <@ = > >= >> @ @> ^ ^@ __between __cast abs acos acosh
add age aggregate ago alias any_value apply approx_count_distinct approx_quantile approx_top_k arbitrary arg_max
arg_max_null arg_max_nulls_last arg_min arg_min_null arg_min_nulls_last argmax argmin array_agg array_aggr
array_aggregate array_append array_apply array_cat array_concat array_contains array_cosine_distance
array_cosine_similarity array_cross_product array_distance array_distinct array_dot_product array_extract array_filter
array_grade_up array_has array_has_all array_has_any array_indexof array_inner_product array_intersect array_length
array_negative_dot_product array_negative_inner_product array_pop_back array_pop_front array_position array_prepend
array_push_back array_push_front array_reduce array_resize array_reverse array_reverse_sort array_select array_slice
array_sort array_to_json array_to_string array_to_string_comma_default array_transform array_unique array_value
array_where array_zip ascii asin asinh atan atan2 atanh avg base64 bin binom bit_and bit_count bit_length bit_or
bit_position bit_xor bitstring bitstring_agg bool_and bool_or cardinality cbrt ceil ceiling century char_length
character_length chr combine_aggr concat concat_ws contains corr cos cosh cot count count_if count_star countif
covar_pop covar_samp cume_dist date_add date_diff date_part date_sub date_trunc datediff datepart datesub datetrunc
day dayname dayofmonth dayofweek dayofyear days_in_month decade decimal_average decode degrees dense_rank divide
element_at encode ends_with entropy enum_code enum_first enum_last enum_range enum_range_boundary epoch epoch_ms
epoch_ns epoch_us era even exp factorial favg fdiv fill filter first first_value flatten floor fmod format
format_bytes formatreadabledecimalsize formatreadablesize from_base64 from_binary from_hex fsum gamma gcd
generate_series geomean geometric_mean get_bit get_type grade_up greatest greatest_common_divisor group_concat hamming
hash hex histogram histogram_exact hour if ilike_escape instr isfinite isinf isnan isodow isoyear jaccard
jaro_similarity jaro_winkler_similarity json json_array json_array_length json_contains json_deep_merge json_exists
json_extract json_extract_path json_extract_path_text json_extract_string json_group_array json_group_object
json_group_structure json_insert json_keys json_merge_patch json_merge_patch_diff json_normalize json_object
json_pretty json_quote json_remove json_replace json_set json_strip_nulls json_structure json_type json_valid
json_value julian kahan_sum kurtosis kurtosis_pop lag last last_day last_value lcase lcm lead least
least_common_multiple left left_grapheme len length length_grapheme lgamma like_escape list list_aggr list_aggregate
list_any_value list_append list_apply list_approx_count_distinct list_avg list_bit_and list_bit_or list_bit_xor
list_bool_and list_bool_or list_cat list_concat list_contains list_cosine_distance list_cosine_similarity list_count
list_distance list_distinct list_dot_product list_element list_entropy list_extract list_filter list_first
list_grade_up list_has list_has_all list_has_any list_histogram list_indexof list_inner_product list_intersect
list_kurtosis list_kurtosis_pop list_last list_mad list_max list_median list_min list_mode list_negative_dot_product
list_negative_inner_product list_pack list_position list_prepend list_product list_reduce list_resize list_reverse
list_reverse_sort list_select list_sem list_skewness list_slice list_sort list_stddev_pop list_stddev_samp
list_string_agg list_sum list_transform list_unique list_value list_var_pop list_var_samp list_where list_zip listagg
ln log log10 log2 lower lpad ltrim lttb mad make_date make_time make_timestamp make_timestamp_ms make_timestamp_ns
make_timestamptz make_type map map_concat map_contains map_contains_entry map_contains_value map_entries map_extract
map_extract_value map_from_entries map_keys map_values max max_by md5 md5_number md5_number_lower md5_number_upper
mean median microsecond millennium millisecond min min_by minute mismatches mod mode month monthname multiply
nanosecond nextafter nfc_normalize not_ilike_escape not_like_escape now nth_value ntile nullif octet_length ord
overlay parse_dirname parse_dirpath parse_filename parse_formatted_bytes parse_path path_join percent_rank pi position
pow power prefix printf product quantile quantile_cont quantile_disc quarter radians random range rank rank_dense
reduce regexp_escape regexp_extract regexp_extract_all regexp_full_match regexp_matches regexp_replace
regexp_split_to_array regr_avgx regr_avgy regr_count regr_intercept regr_r2 regr_slope regr_sxx regr_sxy regr_syy
repeat replace reservoir_quantile reverse right right_grapheme round round_even roundbankers row row_number
row_to_json rpad rtrim second sem set_bit sha1 sha256 sign signbit sin sinh skewness split split_part sqrt starts_with
stddev stddev_pop stddev_samp str_split str_split_regex strftime string_agg string_split string_split_regex
string_to_array strip_accents strlen strpos strptime struct_concat struct_contains struct_extract struct_extract_at
struct_has struct_indexof struct_insert struct_keys struct_pack struct_position struct_update struct_values substr
substring substring_grapheme subtract suffix sum sum_no_overflow sumkahan tan tanh time_bucket timezone timezone_hour
timezone_minute to_base to_base64 to_binary to_centuries to_days to_decades to_hex to_hours to_json to_microseconds
to_millennia to_milliseconds to_minutes to_months to_quarters to_seconds to_timestamp to_weeks to_years today
translate trim trunc try_strptime typeof ucase unbin unhex unicode union_extract union_tag union_value upper
url_decode url_encode var_pop var_samp variance wavg week weekday weekofyear weighted_avg xor year yearweek | || ~ ~~
~~* ~~~
"""
FUNCTIONS = frozenset(re.findall(r"\S+", _FUNCTIONS))
"""Of DuckDB's catalogue, and of its windows, those that compute from their arguments alone and heed an interrupt; a
test fails on any that an upgrade adds."""
NARROW = "narrow it with WHERE, or aggregate"
GRACE = 2.0
"""Seconds for DuckDB to stop by itself."""
MEMORY = 3 * 2**30
"""Bytes; above DuckDB's own limit, whose message is clearer."""


def lock(connection: duckdb.DuckDBPyConnection) -> None:
    """Put files and network out of reach for good; no progress bar of a slow query stands in the answer on stdout."""
    with suppress(duckdb.InvalidInputException):  # in a notebook without ipywidgets, where there is no bar
        connection.execute("SET enable_progress_bar = false")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")


@contextmanager
def after(seconds: float, act: Callable[[], None]) -> Generator[None]:
    """What to do if the body takes longer, such as to interrupt a connection."""
    timer = threading.Timer(seconds, act)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()  # a late interrupt must not hit the next statement


def stoppable(connection: duckdb.DuckDBPyConnection, seconds: float, act: Callable[[], Result]) -> Result:
    """What act() returns, in a thread: interrupted after so many seconds, and at once by Ctrl-C, of which DuckDB in the
    main thread may take no notice until its query has ended."""
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(act)
        try:
            if not wait([running], seconds).done:
                connection.interrupt()
        except KeyboardInterrupt:
            connection.interrupt()
            raise
        return running.result()


@contextmanager
def read_only(connection: duckdb.DuckDBPyConnection) -> Generator[None]:
    connection.execute("BEGIN TRANSACTION READ ONLY")
    try:
        yield
    finally:
        if hasattr(connection, "abort"):  # DuckDB 2 requires unread rows to be discarded explicitly
            connection.abort()
        connection.execute("ROLLBACK")


def syntax_nodes(connection: duckdb.DuckDBPyConnection, sql: str) -> list[Named]:
    """The nodes of a SELECT's syntax tree, innermost first; nothing is run. Raises ValueError for another statement."""
    nodes: list[Named] = []

    def keep(node: Named) -> Named:
        nodes.append(node)
        return node

    ((content,),) = connection.execute("SELECT json_serialize_sql(?)", [sql]).fetchall()
    tree = json.loads(content, object_hook=keep)
    if tree.get("error") is not False:
        raise ValueError(f"only plain SELECT statements are allowed here ({tree.get('error_message')})")
    return nodes


def refuse_functions(nodes: Iterable[Named], others: Collection[str] = ()) -> None:
    """Raises ValueError for a function that is neither in FUNCTIONS nor among `others`."""
    for node in nodes:
        name = node.get("function_name")
        if name is not None and str(name).lower() not in FUNCTIONS and str(name).lower() not in others:
            raise ValueError(f"the function {name!r} is not allowed here")


@contextmanager
def limited(seconds: float) -> Generator[None]:
    """Limits for a query with this time limit. Raises ValueError where memory ends."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    try:
        with after(seconds + GRACE, functools.partial(_end, seconds)):
            if sys.platform == "linux":
                limit_addresses(MEMORY)
            yield
    except MemoryError:  # of Python or Arrow
        raise ValueError(_message(f"needs more memory than there is, or than {MEMORY // 2**30} GB")) from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _end(seconds: float) -> None:
    print(f"sparsedepth: error: {_message(f'ran for longer than {seconds:g} s')}", file=sys.stderr, flush=True)
    os._exit(2)


def _message(limit: str) -> str:
    return f"the query was stopped: it {limit}; {NARROW}"
