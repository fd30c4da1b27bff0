"""Synthetic tasks of known depth (`corpus: task:NAME`): their fields (TaskConfig), and a record of each (TASKS).

Each field belongs to one task and is null elsewhere; missing fields get the task's defaults, so that a stored
run has all of them. The default of `vocab_size` is what the task needs. The sequences: `sparsedepth.data.tasks`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from sparsedepth.config.corpus import TASK, corpus_name, kind_of
from sparsedepth.config.role import DATA
from sparsedepth.config.rule import Rule, refuse_first
from sparsedepth.config.section import WHOLE, Count, Fields, Section
from sparsedepth.plugins import Plugin, is_accepted
from sparsedepth.quantities.measured import PLUGINS
from sparsedepth.quantities.quantity import Named
from sparsedepth.words.plain_text import commas

IGNORED = -100
"""The target of a position without loss, as in F.cross_entropy."""

SOLVED = 0.9
"""Minimum accuracy of a solved difficulty."""

Group = Literal["S3", "A5", "S5", "Z60", "A4xZ5"]
POINTS = {"S3": 3, "A5": 5, "S5": 5, "Z60": 60, "A4xZ5": 20}
"""Points that the group permutes: 1..n for S_n and A_n, residues mod 60, pairs (point of A4, residue mod 5)."""
ORDERS = {"S3": 6, "A5": 60, "S5": 120, "Z60": 60, "A4xZ5": 60}
"""Elements. A5 and S5 are not solvable, the others are: the control of equal order."""


class TaskConfig(Section):
    """The task, where `corpus` names one."""

    task_group: Annotated[Group | None, DATA] = None
    """state_tracking: group of the operations; A5 and S5 (not solvable) need depth, Z60, A4xZ5 and S3 (solvable) in
    theory do not"""
    tracked: Annotated[Literal["point", "element"] | None, DATA] = None
    """state_tracking: state is where one of the moved points is (S5: 5 states), or the product of all operations (A5,
    Z60, A4xZ5: 60 states)"""
    n_operations: Annotated[Count | None, DATA] = None
    """state_tracking: operations are this many random elements that generate the group; null = every element"""
    operation_seed: Annotated[int | None, Field(ge=0, le=2**31 - 1), WHOLE, DATA] = None
    """state_tracking: which random elements; with n_operations"""
    task_form: Annotated[Literal["labels", "text"] | None, DATA] = None
    """state_tracking: labels: the state is the target at every position; text: the state is written now and then, and
    the next token is the target"""
    max_gap: Annotated[Count | None, DATA] = None
    """state_tracking: 1 to this many operations, drawn evenly, before the state is written; with task_form text"""
    letters: Annotated[int | None, Field(ge=3), WHOLE, DATA] = None
    """k_hop: letters of the alphabet"""
    min_hops: Annotated[int | None, Field(ge=0), WHOLE, DATA] = None
    """k_hop: smallest k"""
    max_hops: Annotated[int | None, Field(ge=0), WHOLE, DATA] = None
    """k_hop: largest k, drawn evenly from min_hops on for each sequence"""
    task_code: Annotated[str | None, DATA] = None
    """of a task of a plugin: the digest of its code"""


@dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """What a task is. `draw` in the module of its name in `sparsedepth.data.tasks` makes its sequences."""

    fields: Fields
    """field -> its default, which changes the hash of the task's runs, or a function of the fields above it that gives
    it; None where null is a value"""
    n_tokens: Callable[[Any], int]
    """the smallest `vocab_size`: the tokens of a TaskConfig, target classes included"""
    shortest: Callable[[Any], tuple[int, str]]
    """the length of the shortest sequence with a target, and what it holds"""
    rules: tuple[Rule, ...] = ()
    """which values exclude each other"""


def task_name(corpus: Any) -> str | None:
    """'k_hop' of 'task:k_hop'; None for a text."""
    return corpus_name(corpus).place if kind_of(corpus) is TASK else None


def with_task_fields(values: Fields) -> Named:
    """`values` with the task's missing fields, and the vocabulary that it needs."""
    filled = dict(values)
    name = task_name(filled.get("corpus"))
    if name not in TASKS:
        return filled
    for field, default in TASKS[name].fields.items():
        default = default(filled) if callable(default) else default
        if filled.get(field) is None and default is not None:
            filled[field] = default
    if filled.get("vocab_size") is None:
        try:
            filled["vocab_size"] = TASKS[name].n_tokens(TaskConfig.model_construct(**filled))
        except (AssertionError, KeyError, TypeError):
            filled["vocab_size"] = 1  # other fields are invalid, which the checks report
    return filled


def n_states(task: TaskConfig) -> int:
    """Of state tracking."""
    assert task.task_group is not None
    return (POINTS if task.tracked == "point" else ORDERS)[task.task_group]


def check_task(corpus: str, config: TaskConfig, vocab_size: int, lengths: dict[str, int]) -> None:
    """Raises ValueError for an unknown task, fields of another task, and inconsistent sizes. `lengths`: by field."""
    name = task_name(corpus)
    if name is not None and name not in TASKS:
        names = commas(TASK.prefix + other for other in TASKS)
        raise ValueError(f"corpus={corpus!r} is no task; choose one of {names}, or name its file with --plugin")
    for field in TaskConfig.model_fields:
        value = getattr(config, field)
        if value is not None and (name is None or field not in TASKS[name].fields):
            owner = TASK.prefix + next((other for other, task in TASKS.items() if field in task.fields), "NAME")
            told = f"{field}={value!r} is a field of {owner}, and corpus={corpus!r}"
            raise ValueError(f"{told}; leave {field} out, or set corpus={owner!r}")
    if name is None:
        return
    task = TASKS[name]
    refuse_first(task.rules, config)
    if (needed := task.n_tokens(config)) > vocab_size:
        told = f"vocab_size={vocab_size} is too small for corpus={corpus!r}, which has {needed} tokens"
        raise ValueError(f"{told}; set vocab_size={needed}, or leave it out")
    least, content = task.shortest(config)
    for field, length in lengths.items():
        if length < least:
            raise ValueError(f"{field}={length} does not hold {content}; use at least {least}")


def _other_numbers(task: TaskConfig) -> tuple[int, ...] | None:
    """The least and the largest number of operations, and that of elements, where another is asked for: operations are
    some of the group's elements, enough to generate it."""
    assert task.task_group is not None
    least = 1 if task.task_group == "Z60" else 2
    order = ORDERS[task.task_group]
    if task.n_operations is None or least <= task.n_operations < order:
        return None
    return least, order - 1, order


TASKS = {
    "state_tracking": TaskSpec(
        fields={
            "task_group": "S5", "tracked": "point", "task_form": "labels", "n_operations": None,
            "operation_seed": lambda values: None if values.get("n_operations") is None else 0,
            "max_gap": lambda values: 8 if values["task_form"] == "text" else None,
        },
        n_tokens=lambda task: (
            n_states(task) + (task.n_operations or ORDERS[task.task_group]) + (task.task_form == "text")
        ),
        shortest=lambda task: (2 if task.max_gap is None else task.max_gap + 2, f"max_gap={task.max_gap} operations"),
        rules=(
            (_other_numbers,
             "n_operations={c.n_operations}: task_group={c.task_group!r} has {found[2]} elements, and at least "
             "{found[0]} generate it; choose {found[0]} to {found[1]}, or leave n_operations out for every element"),
            (lambda c: c.operation_seed is not None and c.n_operations is None,
             "operation_seed={c.operation_seed} has no meaning without n_operations; leave operation_seed out"),
            (lambda c: c.max_gap is not None and c.task_form != "text",
             "max_gap={c.max_gap} has no meaning without task_form='text'; leave max_gap out"),
        ),
    ),
    "k_hop": TaskSpec(
        fields={"letters": 4, "min_hops": 0, "max_hops": 4},
        n_tokens=lambda task: task.letters + 1 + task.max_hops + 1,  # letters, 'none', k
        shortest=lambda task: (task.max_hops + 3,  # each hop goes back a place or more, and ends at the second or later
                               f"max_hops={task.max_hops} hops, which need k and {task.max_hops + 2} letters"),
        rules=(
            (lambda c: c.min_hops > c.max_hops,
             "min_hops={c.min_hops} is more than max_hops={c.max_hops}; choose min_hops <= max_hops"),
        ),
    ),
}  # fmt: skip


OF_PLUGINS: dict[str, Plugin] = {}
"""Task -> its plugin, whose code is part of the identity of its runs."""
for _plugin in PLUGINS:
    for _name, _of in _plugin.get("TASKS", {}).items():
        if not is_accepted(_plugin, "task", [_name], TASKS):
            continue
        OF_PLUGINS[_name] = _plugin
        TASKS[_name] = TaskSpec(
            fields={"task_code": _plugin.code},
            n_tokens=lambda task, n=_of["n_tokens"]: n,
            shortest=lambda task, n=_of["shortest"]: (n, "a sequence with a target"),
            rules=(
                (
                    lambda c, code=_plugin.code: c.task_code != code,
                    f"task_code={{c.task_code!r}}: the code of {TASK.prefix + _name} is now {_plugin.code}; use it as "
                    "it was, or leave task_code out",
                ),
            ),
        )
