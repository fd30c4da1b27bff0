"""The answers of the tasks once more, one token after the other and as slowly as their definitions read."""

import numpy as np


def states(tokens: list[int], operations: list[tuple[int, ...]], n_states: int, start) -> list:
    """The state after each token, by applying one permutation after the other to `start` (a point or a tuple)."""
    state, found = start, [start]
    for token in tokens[1:]:
        image = operations[token - n_states]
        state = image[state] if isinstance(state, int) else tuple(image[point] for point in state)
        found.append(state)
    return found


def k_hop(letters: list[int], k: int, none: int) -> list[int]:
    def hop(place: int | None) -> int | None:
        earlier = [j for j in range(place) if letters[j] == letters[place]]
        return earlier[-1] + 1 if earlier else None

    found = []
    for start in range(len(letters)):
        place: int | None = start
        for _ in range(k):
            place = None if place is None else hop(place)
        found.append(none if place is None else letters[place])
    return found


def derived_series(elements: np.ndarray) -> list[int]:
    """Orders of G, [G, G], [[G, G], [G, G]], ... until nothing changes, by multiplying commutators out."""
    group = {tuple(image) for image in elements.tolist()}
    orders = [len(group)]
    while True:
        commutators = {_commutator(a, b) for a in group for b in group}
        closed = _closure(commutators)
        if len(closed) == len(group):
            return orders
        group = closed
        orders.append(len(group))


def after(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(left[point] for point in right)


def _inverse(image: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(sorted(range(len(image)), key=image.__getitem__))


def _commutator(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return after(after(a, b), after(_inverse(a), _inverse(b)))


def _closure(generators: set[tuple[int, ...]]) -> set[tuple[int, ...]]:
    reached, border = set(generators), set(generators)
    while border:
        border = {after(a, b) for a in border for b in generators} - reached
        reached |= border
    return reached
