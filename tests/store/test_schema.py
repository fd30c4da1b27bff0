from sparsedepth import quantities
from sparsedepth.config.run import RunConfig
from sparsedepth.store import schema


def test_every_column_is_explained_and_named_once():
    for view, columns in schema.COLUMNS.items():
        names = [column.name for column in columns]
        assert len(set(names)) == len(names), view
        for column in columns:
            assert column.view == view
            assert column.meaning.strip(), f"{view}.{column.name} has no meaning"
            assert column.type in ("BIGINT", "DOUBLE", "VARCHAR", "BOOLEAN")


def test_runs_hold_every_field_and_every_quantity():
    names = {column.name for column in schema.RUN_COLUMNS}
    assert set(RunConfig.model_fields) | {quantity.name for quantity in quantities.RUNS} <= names
