"""Limits of the process: an end to what escapes DuckDB's own."""

import os
import re
import resource
import subprocess
import sys
import threading
import time

import duckdb
import pandas as pd
import pytest
from support.made_up_runs import make_run

from sparsedepth.config.run import RunConfig
from sparsedepth.store.connection import TABLE_FUNCTIONS, open_store
from sparsedepth.store.fences import FENCES, FUNCTIONS, MEMORY, limited, lock
from sparsedepth.store.table_file import parse


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("limited")
    for seed in range(2):
        make_run(folder, RunConfig(n_layers=2, seed=seed), {"val_loss": 3.0 + seed})
    return folder


@pytest.mark.parametrize(
    ("text", "seconds", "says"),
    [
        ("SELECT length(repeat('x', 4000000000)) FROM runs", 60, "memory"),
        ("SELECT md5(repeat('y', 1500000000)) FROM range(1000)", 0.5, "stopped: it ran for longer than 0.5 s"),
    ],
    ids=["repeat", "md5"],
)
def test_one_huge_value_ends_at_a_limit(results, text, seconds, says):
    command = [sys.executable, "-m", "sparsedepth.cli.main", "query", str(results), text, "--timeout", str(seconds)]
    began = time.monotonic()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("sparsedepth: error: the query ") and done.stderr.count("\n") == 1
    assert says in done.stderr
    assert time.monotonic() - began < 30  # 0.5 s, its grace, and a slow start
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4 * 2**20  # KiB


def test_the_limits_hold_and_end_with_the_query():
    before = resource.getrlimit(resource.RLIMIT_AS), threading.active_count()
    with (
        pytest.raises(ValueError, match=r"^the query was stopped: it needs more memory than there is, or than 3 GB"),
        limited(60),
    ):
        assert resource.getrlimit(resource.RLIMIT_AS) != before[0]
        bytearray(MEMORY + 2**30)
    with pytest.raises(KeyError), limited(0.0):
        raise KeyError
    assert (resource.getrlimit(resource.RLIMIT_AS), threading.active_count()) == before


def test_a_query_of_runs_loads_few_modules(results):
    """They take most of its time."""
    code = (
        "import sys; from sparsedepth.store.connection import open_store\n"
        f"open_store({str(results)!r}).sql('SELECT count(*) FROM runs WHERE val_loss < 3')\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    unwanted = {"pandas", "scipy", "torch", "pyarrow.compute", "pyarrow.dataset", "sparsedepth.config.sweep"}
    assert not {*unwanted, "sparsedepth.store.best", "sparsedepth.store.import_table"}.intersection(loaded)
    assert "duckdb" in loaded and len(loaded) < 480 and done.stderr == ""


def test_a_locked_connection_reads_nothing_else():
    frame = pd.DataFrame({"x": [1]})
    with duckdb.connect(config=FENCES) as connection:
        with pytest.raises(duckdb.Error, match="frame does not exist"):  # nor while the store is opened
            connection.execute("SELECT x FROM frame")
        lock(connection)
        for sql, says in (
            ("SET memory_limit = '3GB'", "locked"),
            ("SELECT x FROM frame", "frame does not exist"),
            ("SELECT content FROM read_text('pyproject.toml')", "disabled"),
        ):
            with pytest.raises(duckdb.Error, match=says):
                connection.execute(sql)
    assert len(frame) == 1


REFUSED = """
__internal_barrier __internal_compress_geometry_point __internal_compress_integral_ubigint
__internal_compress_integral_uinteger __internal_compress_integral_usmallint __internal_compress_integral_utinyint
__internal_compress_string_hugeint __internal_compress_string_ubigint __internal_compress_string_uhugeint
__internal_compress_string_uinteger __internal_compress_string_usmallint __internal_compress_string_utinyint
__internal_compressed_materialization_cast __internal_decompress_geometry_point __internal_decompress_integral_bigint
__internal_decompress_integral_hugeint __internal_decompress_integral_integer __internal_decompress_integral_smallint
__internal_decompress_integral_ubigint __internal_decompress_integral_uhugeint __internal_decompress_integral_uinteger
__internal_decompress_integral_usmallint __internal_decompress_string __internal_json_copy_to_geojson
__internal_json_copy_to_json __internal_tablefilter_bloom_filter __internal_tablefilter_dynamic
__internal_tablefilter_optional __internal_tablefilter_prefix_range __internal_tablefilter_selectivity_optional
assert_true bar bitstring_byte_comparable can_cast_implicitly cast_to_type col_description collate_aa collate_af
collate_am collate_ar collate_ar_sa collate_as collate_az collate_bal collate_be collate_bg collate_blo collate_bn
collate_bo collate_br collate_bs collate_ca collate_ceb collate_chr collate_cs collate_cu collate_cy collate_da
collate_de collate_de_at collate_dsb collate_dz collate_ee collate_el collate_en collate_en_us collate_eo collate_es
collate_et collate_fa collate_fa_af collate_ff collate_fi collate_fil collate_fo collate_fr collate_fr_ca collate_fy
collate_ga collate_gl collate_gu collate_ha collate_haw collate_he collate_he_il collate_hi collate_hr collate_hsb
collate_hu collate_hy collate_id collate_id_id collate_ig collate_is collate_it collate_ja collate_ka collate_kk
collate_kl collate_km collate_kn collate_ko collate_kok collate_ku collate_ky collate_lb collate_lij collate_lkt
collate_ln collate_lo collate_lt collate_lv collate_mk collate_ml collate_mn collate_mr collate_ms collate_mt
collate_my collate_nb collate_nb_no collate_ne collate_nl collate_nn collate_no collate_noaccent collate_nso
collate_om collate_or collate_pa collate_pa_in collate_pl collate_ps collate_pt collate_ro collate_ru collate_sa
collate_se collate_sgs collate_si collate_sk collate_sl collate_smn collate_sq collate_sr collate_sr_ba collate_sr_me
collate_sr_rs collate_ssy collate_st collate_sv collate_sw collate_ta collate_te collate_th collate_tk collate_tn
collate_to collate_tr collate_ug collate_uk collate_ur collate_uz collate_vi collate_vo collate_wae collate_wo
collate_xh collate_yi collate_yo collate_zh collate_zh_cn collate_zh_hk collate_zh_mo collate_zh_sg collate_zh_tw
collate_zu combine constant_or_null create_sort_key current_catalog current_connection_id current_database
current_date current_localtime current_localtimestamp current_query current_query_id current_role current_schema
current_schemas current_setting current_transaction_id current_user currval damerau_levenshtein decimal_division
editdist3 equi_width_bins error finalize format_pg_type format_type from_json from_json_strict gen_random_uuid
generate_subscripts get_block_size get_current_time get_current_timestamp getvariable has_any_column_privilege
has_column_privilege has_database_privilege has_foreign_data_wrapper_privilege has_function_privilege
has_language_privilege has_schema_privilege has_sequence_privilege has_server_privilege has_table_privilege
has_tablespace_privilege hive_partition_component icu_collate_aa icu_collate_af icu_collate_am icu_collate_ar
icu_collate_ar_sa icu_collate_as icu_collate_az icu_collate_bal icu_collate_be icu_collate_bg icu_collate_blo
icu_collate_bn icu_collate_bo icu_collate_br icu_collate_bs icu_collate_ca icu_collate_ceb icu_collate_chr
icu_collate_cs icu_collate_cu icu_collate_cy icu_collate_da icu_collate_de icu_collate_de_at icu_collate_dsb
icu_collate_dz icu_collate_ee icu_collate_el icu_collate_en icu_collate_en_us icu_collate_eo icu_collate_es
icu_collate_et icu_collate_fa icu_collate_fa_af icu_collate_ff icu_collate_fi icu_collate_fil icu_collate_fo
icu_collate_fr icu_collate_fr_ca icu_collate_fy icu_collate_ga icu_collate_gl icu_collate_gu icu_collate_ha
icu_collate_haw icu_collate_he icu_collate_he_il icu_collate_hi icu_collate_hr icu_collate_hsb icu_collate_hu
icu_collate_hy icu_collate_id icu_collate_id_id icu_collate_ig icu_collate_is icu_collate_it icu_collate_ja
icu_collate_ka icu_collate_kk icu_collate_kl icu_collate_km icu_collate_kn icu_collate_ko icu_collate_kok
icu_collate_ku icu_collate_ky icu_collate_lb icu_collate_lij icu_collate_lkt icu_collate_ln icu_collate_lo
icu_collate_lt icu_collate_lv icu_collate_mk icu_collate_ml icu_collate_mn icu_collate_mr icu_collate_ms
icu_collate_mt icu_collate_my icu_collate_nb icu_collate_nb_no icu_collate_ne icu_collate_nl icu_collate_nn
icu_collate_no icu_collate_noaccent icu_collate_nso icu_collate_om icu_collate_or icu_collate_pa icu_collate_pa_in
icu_collate_pl icu_collate_ps icu_collate_pt icu_collate_ro icu_collate_ru icu_collate_sa icu_collate_se
icu_collate_sgs icu_collate_si icu_collate_sk icu_collate_sl icu_collate_smn icu_collate_sq icu_collate_sr
icu_collate_sr_ba icu_collate_sr_me icu_collate_sr_rs icu_collate_ssy icu_collate_st icu_collate_sv icu_collate_sw
icu_collate_ta icu_collate_te icu_collate_th icu_collate_tk icu_collate_tn icu_collate_to icu_collate_tr
icu_collate_ug icu_collate_uk icu_collate_ur icu_collate_uz icu_collate_vi icu_collate_vo icu_collate_wae
icu_collate_wo icu_collate_xh icu_collate_yi icu_collate_yo icu_collate_zh icu_collate_zh_cn icu_collate_zh_hk
icu_collate_zh_mo icu_collate_zh_sg icu_collate_zh_tw icu_collate_zu icu_sort_key in_search_path index_key
inet_client_addr inet_client_port inet_server_addr inet_server_port invoke is_histogram_other_bin
json_copy_strftime_if_date json_copy_strftime_if_timestamp json_deserialize_sql json_serialize_plan json_serialize_sql
json_transform json_transform_strict levenshtein map_to_pg_oid nextval normalized_interval obj_description
parse_duckdb_log_message pg_collation_is_visible pg_conf_load_time pg_conversion_is_visible pg_function_is_visible
pg_get_constraintdef pg_get_expr pg_get_viewdef pg_has_role pg_is_other_temp_schema pg_my_temp_schema
pg_opclass_is_visible pg_operator_is_visible pg_opfamily_is_visible pg_postmaster_start_time pg_size_pretty pg_sleep
pg_table_is_visible pg_ts_config_is_visible pg_ts_dict_is_visible pg_ts_parser_is_visible pg_ts_template_is_visible
pg_type_is_visible pg_typeof regexp_split_to_table remap_struct replace_type session_user setseed setval
shobj_description sleep_ms st_asbinary st_asgeojson st_astext st_aswkb st_aswkt st_crs st_geomfromgeojson
st_geomfromwkb st_intersects_extent st_setcrs stats switch timetz_byte_comparable to_aggregate_state
transaction_timestamp txid_current unpivot_list user uuid uuid_extract_timestamp uuid_extract_version uuidv4 uuidv7
variant_array_length variant_bytes_to_variant variant_comparator variant_contains variant_exists variant_extract
variant_extract_string variant_group_array variant_group_object variant_keys variant_normalize
variant_to_parquet_variant variant_type variant_typeof vector_type version vertex_extract write_log
"""
"""Functions of DuckDB's catalogue that tell of settings, state or time, change it, or do not heed an interrupt."""


def test_every_function_of_the_catalogue_is_allowed_or_refused_by_name():
    """New ones in an upgrade fail here: each is put into one of the two lists, by what it does."""
    kinds, refused = "('scalar', 'aggregate', 'macro')", {*re.findall(r"\S+", REFUSED)}
    with duckdb.connect() as connection:
        found = connection.execute(
            f"SELECT lower(function_name) FROM duckdb_functions() WHERE function_type IN {kinds}"
        )
        catalogue = {name for (name,) in found.fetchall() if " " not in name}
    assert not FUNCTIONS & refused and not refused & TABLE_FUNCTIONS
    assert catalogue - FUNCTIONS - TABLE_FUNCTIONS == refused


@pytest.mark.parametrize(
    "text",
    ["json_serialize_plan('SELECT 1')", "current_setting('threads')", "getvariable('a')", "sleep_ms(9)",
     "levenshtein(repeat('a', 9), 'b')", "Version()", "main.current_setting('threads')", "pg_sleep(9)",
     "list_transform([1], lambda x: current_setting('threads'))"],
)  # fmt: skip
def test_functions_of_settings_state_and_endless_ones_are_refused_in_queries_and_maps(results, text):
    with open_store(results) as store, pytest.raises(ValueError, match="is not allowed here"):
        store.sql(f"SELECT {text} FROM runs")
    with duckdb.connect() as connection, pytest.raises(ValueError, match="is not allowed here"):
        parse(connection, text, ["a"])


@pytest.mark.parametrize("text", ["sum(a) OVER ()", "row_number() OVER (ORDER BY a)", "unnest([a, 1])", "unnest([1])"])
def test_an_expression_of_a_map_is_of_one_row(text):
    with duckdb.connect() as connection, pytest.raises(ValueError, match="use columns, operators and functions of one"):
        parse(connection, text, ["a"])
