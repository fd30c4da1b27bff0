"""Task fields: filled in, checked, and kept apart from those of a text."""

import re
from pathlib import Path

import pytest

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.task import TASKS, TaskConfig

TRACKING = {"corpus": "task:state_tracking"}


def run(**fields) -> RunConfig:
    return build(RunConfig, fields, "run.yaml")


@pytest.mark.parametrize(
    ("fields", "vocab_size"),
    [
        ({**TRACKING, "n_operations": 4}, 9),  # 5 points, 4 operations
        (TRACKING, 125),
        ({**TRACKING, "task_group": "A5", "tracked": "element"}, 120),
        ({**TRACKING, "task_group": "Z60", "tracked": "element"}, 120),
        ({**TRACKING, "task_group": "S3", "task_form": "text"}, 10),
        ({"corpus": "task:k_hop", "letters": 4, "max_hops": 16}, 22),
    ],
)
def test_the_vocabulary_is_the_tasks_where_it_is_left_out(fields, vocab_size):
    assert run(**fields).vocab_size == vocab_size
    assert run(**fields, vocab_size=500).vocab_size == 500


def test_fields_left_out_are_stored_as_they_were():
    config = run(**TRACKING)
    assert (config.task_group, config.tracked, config.task_form) == ("S5", "point", "labels")
    assert (
        config.run_id
        == run(**TRACKING, task_group="S5", tracked="point").run_id
        != run(**TRACKING, task_group="A5").run_id
    )
    assert run(**TRACKING, n_operations=4).run_id == run(**TRACKING, n_operations=4, operation_seed=0).run_id
    assert build(RunConfig, config.model_dump(mode="json"), "all").run_id == config.run_id


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"corpus": "task:sorting"}, ["corpus='task:sorting'", "task:k_hop"]),
        ({**TRACKING, "task_group": "A6"}, ["task_group='A6'", "'A5'"]),
        ({"task_group": "A5"}, ["task_group='A5'", "corpus='stdlib'", "task:state_tracking"]),
        ({**TRACKING, "letters": 4}, ["letters=4", "task:k_hop"]),
        ({**TRACKING, "max_hops": 4}, ["max_hops=4", "task:k_hop"]),
        ({**TRACKING, "vocab_size": 100}, ["vocab_size=100", "125 tokens"]),
        ({**TRACKING, "n_operations": 120}, ["n_operations=120", "120 elements", "2 to 119"]),
        ({**TRACKING, "n_operations": 1}, ["n_operations=1", "at least 2 generate it"]),
        ({**TRACKING, "operation_seed": 1}, ["operation_seed=1", "n_operations"]),
        ({**TRACKING, "max_gap": 4}, ["max_gap=4", "task_form='text'"]),
        ({**TRACKING, "task_form": "text", "max_gap": 300}, ["seq_len=256", "max_gap=300", "at least 302"]),
        ({**TRACKING, "tokenizer": "bpe:300"}, ["tokenizer='bpe:300'", "is about text"]),
        ({**TRACKING, "chunk_len": 256}, ["chunk_len=256", "is about text"]),
        ({**TRACKING, "mask_documents": True, "vocab_size": 300}, ["mask_documents=True", "is about text"]),
        ({"corpus": "task:k_hop", "min_hops": 5}, ["min_hops=5", "max_hops=4"]),
        ({"corpus": "task:k_hop", "letters": 2}, ["letters=2", "greater than or equal to 3"]),
        ({"corpus": "task:k_hop", "seq_len": 2, "max_hops": 0}, ["seq_len=2", "at least 3"]),
        ({"corpus": "task:k_hop", "seq_len": 8, "max_hops": 40}, ["seq_len=8", "max_hops=40", "at least 43"]),
        ({"corpus": "task:k_hop", "eval_seq_len": 6}, ["eval_seq_len=6", "max_hops=4", "at least 7"]),
    ],
)
def test_mistakes_are_named_with_their_value_and_a_fix(fields, words):
    with pytest.raises(ValueError) as caught:
        run(**fields)
    message = str(caught.value)
    assert message.startswith("run.yaml: ") and "\n" not in message
    for word in words:
        assert word in message, message


def test_every_field_has_a_task_and_every_task_its_row_in_the_docs():
    of_plugins = {"task_code"}
    assert {field for task in TASKS.values() for field in task.fields} == set(TaskConfig.model_fields) - of_plugins
    page = (Path(__file__).parents[2] / "docs" / "sweeps.md").read_text()
    rows = re.findall(r"^\| `task:(\w+)` \| (.*) \| .* \| (.*) \|$", page, re.MULTILINE)
    shown = [(name, set(re.findall(r"`(\w+)`", fields))) for name, fields, _ in rows]
    assert shown == [(name, set(task.fields)) for name, task in TASKS.items()]
    assert all(difficulty for *_, difficulty in rows)
