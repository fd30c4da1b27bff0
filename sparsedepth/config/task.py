"""TaskConfig: synthetic tasks of known depth (`corpus: task:NAME`).

    task:state_tracking   follow a thing, or a product, through the operations of a group       (2404.08819)
    task:k_hop            follow 'what came after this letter, last time' k times               (2402.09268)
    task:successor        the k-th successor in a cycle that is given as shuffled pairs         (2512.17351, Depo)
    task:arithmetic       the value of a prefix expression of + - x modulo a number             (2512.17351, Mano)

Each field belongs to one or two tasks and is null elsewhere; missing fields get the task's defaults, so that a stored
run has all of them. The default of `vocab_size` is what the task needs. The sequences: `sparsedepth.data.tasks`.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sparsedepth.config.role import DATA
from sparsedepth.config.section import Count, Section

TASK = "task:"

SFT = "sft:"
"""Prefix of a corpus of prompts and answers, with loss on the answers only."""

IGNORED = -100
"""The target of a position without loss, as in F.cross_entropy."""

Group = Literal["S3", "A5", "S5", "Z60", "A4xZ5"]
POINTS: dict[str, int] = {"S3": 3, "A5": 5, "S5": 5, "Z60": 60, "A4xZ5": 20}
"""Points that the group permutes: 1..n for S_n and A_n, residues mod 60, pairs (point of A4, residue mod 5)."""
ORDERS: dict[str, int] = {"S3": 6, "A5": 60, "S5": 120, "Z60": 60, "A4xZ5": 60}
"""Elements. A5 and S5 are not solvable, the others are: the control of equal order."""

TASK_DEFAULTS: dict[str, dict[str, Any]] = {
    "state_tracking": {"task_group": "S5", "tracked": "point", "task_form": "labels"},
    "k_hop": {"letters": 4, "min_hops": 0, "max_hops": 4},
    "successor": {"cycle_len": 8, "min_hops": 1, "max_hops": 4},
    "arithmetic": {"modulus": 23, "expression_len": 10},
}
"""The defaults of each task's fields."""

OPTIONAL: dict[str, tuple[str, ...]] = {"state_tracking": ("n_operations", "operation_seed", "max_gap")}
"""Further fields of a task, for which null is a valid value."""

TEXT_ONLY = ("text_field", "tokenizer", "val_fraction", "max_corpus_tokens", "chunk_len", "mask_documents", "eod")
"""Fields about reading text, which must be at their defaults with a task."""


class TaskConfig(Section):
    """The task, where `corpus` names one."""

    task_group: Annotated[
        Group | None,
        Field(description="state_tracking: group of the operations; A5 and S5 (not solvable) need depth, Z60, A4xZ5 "
              "and S3 (solvable) in theory do not"), DATA
    ] = None  # fmt: skip
    tracked: Annotated[
        Literal["point", "element"] | None,
        Field(description="state_tracking: state is where one of the moved points is (S5: 5 states), or the product of "
              "all operations (A5, Z60, A4xZ5: 60 states)"), DATA
    ] = None  # fmt: skip
    n_operations: Annotated[
        Count | None,
        Field(description="state_tracking: operations are this many random elements that generate the group; null = "
              "every element"), DATA
    ] = None  # fmt: skip
    operation_seed: Annotated[int | None, Field(ge=0, le=2**31 - 1), DATA] = None
    """state_tracking: which random elements; with n_operations"""
    task_form: Annotated[
        Literal["labels", "text"] | None,
        Field(description="state_tracking: labels: the state is the target at every position; text: the state is "
              "written now and then, and the next token is the target"), DATA
    ] = None  # fmt: skip
    max_gap: Annotated[
        Count | None,
        Field(description="state_tracking: 1 to this many operations, drawn evenly, before the state is written; with "
              "task_form text"), DATA
    ] = None  # fmt: skip
    letters: Annotated[int | None, Field(ge=3, description="k_hop: letters of the alphabet"), DATA] = None
    min_hops: Annotated[int | None, Field(ge=0, description="k_hop, successor: smallest k"), DATA] = None
    max_hops: Annotated[
        int | None,
        Field(ge=0, description="k_hop, successor: largest k, drawn evenly from min_hops on, for each sequence of "
              "k_hop, each query of successor"), DATA
    ] = None  # fmt: skip
    cycle_len: Annotated[int | None, Field(ge=2, description="successor: nodes of the cycle"), DATA] = None
    modulus: Annotated[int | None, Field(ge=2, description="arithmetic: numbers are 0 to modulus - 1"), DATA] = None
    expression_len: Annotated[Count | None, DATA] = None
    """arithmetic: operations of an expression, drawn evenly from 1 to this many"""

    @model_validator(mode="before")
    @classmethod
    def _fill_task(cls, values: Any) -> Any:
        """Fill in the task's missing fields, and the vocabulary that it needs."""
        if not isinstance(values, dict) or (name := task_name(values.get("corpus"))) not in TASK_DEFAULTS:
            return values
        filled = dict(values)
        for field, default in TASK_DEFAULTS[name].items():
            filled[field] = default if filled.get(field) is None else filled[field]
        if filled.get("n_operations") is not None and filled.get("operation_seed") is None:
            filled["operation_seed"] = 0
        if filled.get("task_form") == "text" and filled.get("max_gap") is None:
            filled["max_gap"] = 8
        if filled.get("vocab_size") is None:
            filled["vocab_size"] = _vocabulary(name, filled)
        return filled


def task_name(corpus: Any) -> str | None:
    """'k_hop' of 'task:k_hop'; None for a text."""
    return corpus.removeprefix(TASK) if isinstance(corpus, str) and corpus.startswith(TASK) else None


def is_sft(corpus: Any) -> bool:
    """Whether a corpus is made of prompts and answers (supervised fine-tuning)."""
    return isinstance(corpus, str) and corpus.startswith(SFT)


def n_states(task: TaskConfig) -> int:
    """Of state tracking."""
    assert task.task_group is not None
    return (POINTS if task.tracked == "point" else ORDERS)[task.task_group]


def n_operations(task: TaskConfig) -> int:
    """Of state tracking."""
    assert task.task_group is not None
    return task.n_operations or ORDERS[task.task_group]


def _vocabulary(name: str, values: dict[str, Any]) -> int:
    """What the task needs; 1 if its fields are invalid, which the checks report."""
    try:
        return task_vocabulary(name, TaskConfig.model_construct(**values))
    except (AssertionError, KeyError, TypeError):
        return 1


def task_vocabulary(name: str, task: TaskConfig) -> int:
    """The smallest `vocab_size`: the tokens of the task, target classes included."""
    if name == "state_tracking":
        return n_states(task) + n_operations(task) + (task.task_form == "text")
    if name == "k_hop":
        assert task.letters is not None and task.max_hops is not None
        return task.letters + 1 + task.max_hops + 1  # letters, 'none', k
    if name == "successor":
        assert task.cycle_len is not None and task.max_hops is not None
        return task.cycle_len + task.max_hops + 1  # nodes, k
    assert name == "arithmetic" and task.modulus is not None
    return task.modulus + 4  # numbers, + - x, =


def check_task(corpus: str, task: TaskConfig, vocab_size: int, lengths: dict[str, int]) -> None:
    """Raises ValueError for an unknown task, fields of another task, and inconsistent sizes. `lengths`: seq_len and
    eval_seq_len, by name."""
    name = task_name(corpus)
    if name is not None and name not in TASK_DEFAULTS:
        raise ValueError(
            f"corpus={corpus!r} is no task; choose one of {', '.join(TASK + other for other in TASK_DEFAULTS)}"
        )
    fields = () if name is None else (*TASK_DEFAULTS[name], *OPTIONAL.get(name, ()))
    for field in TaskConfig.model_fields:
        if field not in fields and getattr(task, field) is not None:
            owners = [TASK + other for other, own in TASK_DEFAULTS.items() if field in (*own, *OPTIONAL.get(other, ()))]
            raise ValueError(
                f"{field}={getattr(task, field)!r} is a field of {' and '.join(owners)}, and corpus={corpus!r}; "
                f"leave {field} out, or set corpus={owners[0]!r}"
            )
    if name is None:
        return
    if name == "state_tracking":
        _check_operations(task)
    if task.cycle_len is not None and task.max_hops is not None and task.max_hops >= task.cycle_len:
        raise ValueError(
            f"max_hops={task.max_hops} goes round a cycle of cycle_len={task.cycle_len}; "
            f"choose at most {task.cycle_len - 1}"
        )
    if task.min_hops is not None and task.max_hops is not None and task.min_hops > task.max_hops:
        raise ValueError(f"min_hops={task.min_hops} is more than max_hops={task.max_hops}; choose min_hops <= max_hops")
    if (needed := task_vocabulary(name, task)) > vocab_size:
        raise ValueError(
            f"vocab_size={vocab_size} is too small for corpus={corpus!r}, which has {needed} tokens; "
            f"set vocab_size={needed}, or leave it out"
        )
    for field, length in lengths.items():
        _check_length(name, task, field, length)


def _check_operations(task: TaskConfig) -> None:
    assert task.task_group is not None
    k, order, least = task.n_operations, ORDERS[task.task_group], 1 if task.task_group == "Z60" else 2
    if k is not None and not least <= k < order:
        raise ValueError(
            f"n_operations={k}: task_group={task.task_group!r} has {order} elements, and at least {least} generate it; "
            f"choose {least} to {order - 1}, or leave n_operations out for every element"
        )
    for field, owner, has_owner in (
        ("operation_seed", "n_operations", k is not None),
        ("max_gap", "task_form='text'", task.task_form == "text"),
    ):
        if getattr(task, field) is not None and not has_owner:
            raise ValueError(f"{field}={getattr(task, field)} has no meaning without {owner}; leave {field} out")


def _check_length(name: str, task: TaskConfig, field: str, length: int) -> None:
    """Every sequence must have a target."""
    if name == "state_tracking":
        least, content = (2, "") if task.max_gap is None else (task.max_gap + 2, f"max_gap={task.max_gap} operations")
    elif name == "k_hop":
        least, content = 3, "k and two letters"
    elif name == "successor":
        assert task.cycle_len is not None
        least, content = 2 * task.cycle_len + 2, f"the pairs of cycle_len={task.cycle_len} and a query"
        if length % 2:
            raise ValueError(
                f"{field}={length} must be even: task:successor is made of pairs and queries of two tokens"
            )
    else:
        assert task.expression_len is not None
        least = 2 * task.expression_len + 2
        content = f"an expression of expression_len={task.expression_len} operations"
    if length < least:
        raise ValueError(f"{field}={length} does not hold {content}; use at least {least}")
