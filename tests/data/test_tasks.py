"""Tasks: every answer against a slow plain implementation, groups by their laws, streams that do not meet."""

import itertools
import math

import numpy as np
import pytest
from support import task_answers

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.task import IGNORED, ORDERS, POINTS, TASKS as RECORDS
from sparsedepth.data.tasks.state_tracking import elements, generates, operations
from sparsedepth.data.tasks.stream import TaskSource

SMALL = {"d_model": 8, "n_heads": 1, "batch_tokens": 2048, "train_tokens": 4096}
TRACKING = {"corpus": "task:state_tracking", "seq_len": 32}
TASKS = {
    "point": {**TRACKING, "n_operations": 4},
    "element": {**TRACKING, "task_group": "A5", "tracked": "element"},
    "pairs": {**TRACKING, "task_group": "A4xZ5", "n_operations": 3, "operation_seed": 5},
    "text": {**TRACKING, "task_group": "S3", "task_form": "text", "max_gap": 4},
    "k_hop": {"corpus": "task:k_hop", "seq_len": 64, "max_hops": 16, "letters": 4},
    "one_k": {"corpus": "task:k_hop", "seq_len": 32, "min_hops": 2, "max_hops": 2},
}


def config(name: str, **fields) -> RunConfig:
    return build(RunConfig, {**SMALL, **TASKS[name], **fields}, "task")


def sequences(name: str, **fields):
    chosen = config(name, **fields)
    return chosen, TaskSource(chosen).batch(chosen, 3)


# Groups


@pytest.mark.parametrize("group", ORDERS)
def test_a_group_has_its_order_and_its_points_and_is_closed(group):
    images = elements(group)
    assert images.shape == (ORDERS[group], POINTS[group])
    known = {tuple(image) for image in images.tolist()}
    assert len(known) == ORDERS[group] and tuple(range(POINTS[group])) == tuple(images[0])
    assert all(sorted(image) == list(range(POINTS[group])) for image in known)
    assert all(task_answers.after(a, b) in known for a, b in itertools.product(known, repeat=2))


def test_which_groups_are_solvable():
    """A group is solvable if and only if its derived series ends at one element; abelian if it does so at once."""
    series = {group: task_answers.derived_series(elements(group)) for group in ORDERS}
    assert series == {"S3": [6, 3, 1], "A5": [60], "S5": [120, 60], "Z60": [60, 1], "A4xZ5": [60, 4, 1]}


@pytest.mark.parametrize("group", ORDERS)
def test_random_operations_generate_the_group_and_are_chosen_by_their_seed_alone(group):
    def chosen(**fields):
        return operations(config("point", task_group=group, n_operations=3, **fields))

    first = chosen()
    assert generates(first, ORDERS[group]) and len({tuple(image) for image in first.tolist()}) == 3
    assert (chosen(seed=7, seq_len=16) == first).all()
    assert any((chosen(operation_seed=seed) != first).any() for seed in (1, 2))
    assert not generates(elements("S5")[:1], 120)
    assert not generates(elements("A5"), 120)


def test_no_operation_is_the_identity_and_every_other_element_may_be_one():
    """Three of the five others of S3, by 40 seeds."""
    seeded = [config("point", task_group="S3", n_operations=3, operation_seed=seed) for seed in range(40)]
    chosen = {tuple(image) for each in seeded for image in operations(each)}
    assert chosen == {*itertools.permutations(range(3))} - {(0, 1, 2)}


# Records


def test_every_task_has_a_case_above():
    assert {fields["corpus"] for fields in TASKS.values()} == {f"task:{name}" for name in RECORDS}


@pytest.mark.parametrize("name", TASKS)
def test_a_record_is_true_to_the_sequences(name):
    """The vocabulary ends with the last token, and the shortest sequence has a target."""
    chosen = config(name)
    least, _ = RECORDS[chosen.corpus.removeprefix("task:")].shortest(chosen)
    drawn, shortest = TaskSource(chosen).held_out(chosen.seq_len, 65_536), TaskSource(chosen).held_out(least, 8192)
    assert max(drawn.inputs.max(), drawn.targets.max()) == chosen.vocab_size - 1
    assert (shortest.targets != IGNORED).any(axis=1).all()


# Answers


@pytest.mark.parametrize("name", ["point", "element", "pairs"])
def test_states_follow_from_the_operations_one_by_one(name):
    chosen, drawn = sequences(name)
    group = [tuple(image) for image in elements(chosen.task_group).tolist()]
    points = chosen.tracked == "point"
    n_states = POINTS[chosen.task_group] if points else len(group)
    images = [tuple(image) for image in operations(chosen).tolist()]
    for inputs, targets in zip(drawn.inputs[:8].tolist(), drawn.targets[:8].tolist(), strict=True):
        start = inputs[0] if points else group[inputs[0]]
        found = task_answers.states(inputs, images, n_states, start)
        assert targets == (found if points else [group.index(state) for state in found])
    assert (drawn.difficulty == np.arange(32)).all()


def test_text_form_writes_the_state_behind_each_equals_sign():
    chosen = config("text")
    images, source = [tuple(image) for image in operations(chosen).tolist()], TaskSource(chosen)
    equals, gaps = 3 + len(images), set()
    train, held_out = source.batch(chosen, 0), source.held_out(32, 32 * 60)
    assert (train.targets[:, :-1] == train.inputs[:, 1:]).all()  # the next token, and all count
    for row in range(60):
        tokens, targets = held_out.inputs[row].tolist(), held_out.targets[row].tolist()
        state, since = tokens[0], 0
        assert state < 3
        for place, token in enumerate(tokens[1:], start=1):
            if token == equals:
                assert targets[place] == state and held_out.difficulty[row, place] == since
                gaps.add(since)
                since = 0
            else:
                assert targets[place] == IGNORED
                if token < 3:
                    assert token == state and tokens[place - 1] == equals
                else:
                    state, since = images[token - 3][state], since + 1
    assert gaps == {1, 2, 3, 4}
    assert 0.15 < held_out.n_scored / held_out.targets.size < 0.3


@pytest.mark.parametrize("name", ["k_hop", "one_k"])
def test_hops_are_those_of_the_definition(name):
    chosen, drawn = sequences(name)
    none = chosen.letters
    for inputs, targets, difficulty in zip(drawn.inputs, drawn.targets, drawn.difficulty, strict=True):
        k = int(inputs[0]) - none - 1
        letters = inputs[1:].tolist()
        assert (difficulty == k).all() and chosen.min_hops <= k <= chosen.max_hops
        assert max(letters) < none and all(a != b for a, b in itertools.pairwise(letters))
        assert targets.tolist() == [IGNORED, *task_answers.k_hop(letters, k, none)]


def test_an_example_of_k_hop_by_hand():
    """a b c a b: the last b follows the a that follows ... ; 1 hop from the last b is c, 2 hops have no earlier c."""
    assert task_answers.k_hop([0, 1, 2, 0, 1], 1, 9) == [9, 9, 9, 1, 2]
    assert task_answers.k_hop([0, 1, 2, 0, 1], 2, 9) == [9, 9, 9, 9, 9]


@pytest.mark.parametrize(("letters", "longest"), [(3, 9), (4, 7)])
def test_max_hops_is_the_most_hops_that_some_sequence_holds(letters, longest):
    """Every sequence of each length in turn: alternating letters hop furthest, one place back at each hop."""
    for seq_len in range(3, longest + 1):
        most = max(
            k
            for sequence in itertools.product(range(letters), repeat=seq_len - 1)
            if sequence[0] == 0 and all(a != b for a, b in itertools.pairwise(sequence))
            for k in range(seq_len + 1)
            if set(task_answers.k_hop([*sequence], k, letters)) != {letters}
        )
        fields = {"seq_len": seq_len, "letters": letters, "batch_tokens": 8 * seq_len, "train_tokens": 8 * seq_len}
        assert config("k_hop", **fields, max_hops=most).max_hops == most
        with pytest.raises(ValueError, match=f"seq_len={seq_len} does not hold max_hops={most + 1} hops"):
            config("k_hop", **fields, max_hops=most + 1)


# Streams


@pytest.mark.parametrize("name", TASKS)
def test_a_batch_is_a_function_of_task_seed_and_step(name):
    chosen = config(name)
    first, again = TaskSource(chosen).batch(chosen, 17), TaskSource(chosen)
    again.batch(chosen, 500)
    for part in ("inputs", "targets", "difficulty"):
        assert (getattr(again.batch(chosen, 17), part) == getattr(first, part)).all()
    assert first.inputs.shape == (2048 // chosen.seq_len, chosen.seq_len) == first.targets.shape
    assert first.inputs.dtype == first.targets.dtype == np.int64
    assert first.inputs.min() >= 0 and first.inputs.max() < chosen.vocab_size
    counted = first.targets[first.targets != IGNORED]
    assert counted.min() >= 0 and counted.max() < chosen.vocab_size
    other = config(name, seed=1)
    assert (TaskSource(other).batch(other, 17).inputs != first.inputs).any()
    assert (again.batch(chosen, 18).inputs != first.inputs).any()


@pytest.mark.parametrize("name", ["point", "element", "k_hop"])
def test_training_never_meets_what_is_held_out(name):
    """Sequences this long are met twice by chance once in 10^8 trials."""
    chosen = config(name)
    source = TaskSource(chosen)
    held_out = {row.tobytes() for row in source.held_out(chosen.seq_len, 65_536).inputs}
    assert len(held_out) == 65_536 // chosen.seq_len
    batches = (source.batch(config(name, seed=seed), step) for seed in (0, 1) for step in range(40))
    met = [row.tobytes() for batch in batches for row in batch.inputs]
    assert len(set(met)) == len(met)  # fresh at every step, and of every seed
    assert held_out.isdisjoint(met)


def test_held_out_sequences_are_those_of_the_task_and_ranges_do_not_overlap():
    source = TaskSource(config("point"))
    everything = source.held_out(32, 32 * 3000).inputs
    assert len(everything) == 3000
    assert (TaskSource(config("point", seed=9, lr=0.1)).held_out(32, 640).inputs == everything[:20]).all()
    assert (source.held_out(32, 320, skip_tokens=32 * 2000 + 1).inputs == everything[2001:2011]).all()
    assert TaskSource(config("point", operation_seed=1)).data_hash != source.data_hash
    assert TaskSource(config("point", seed=9)).data_hash == source.data_hash


def test_what_is_read_is_as_frequent_as_it_should_be():
    """A chi-squared statistic near its 3 degrees of freedom."""
    held_out = TaskSource(config("point")).held_out(32, 32 * 20_000)
    tokens = np.bincount(held_out.inputs[:, 1:].ravel(), minlength=9)
    assert (tokens[:5] == 0).all() and ((tokens[5:] - 155_000) ** 2 / 155_000).sum() < 18
    letters = TaskSource(config("k_hop")).held_out(64, 64 * 5000)
    counts = np.bincount(letters.inputs[:, 1:].ravel(), minlength=22)[:4]
    assert ((counts - 78_750) ** 2 / 78_750).sum() < 18
    assert abs(np.bincount(letters.inputs[:, 0] - 5, minlength=17) - 294).max() < 5 * math.sqrt(294)
