"""The domain of a recipe: where its runs lie, outside of which they are no evidence."""

from typing import Any

import pandas as pd

from sparsedepth.effects.knobs import plain
from sparsedepth.recipe.card import Domain


def domain_of(runs: pd.DataFrame) -> Domain:
    """The values or the range of what decides whether a reader's model is inside."""
    names = ("n_layers", "d_model", "seq_len", "params_total", "params_active", "tokens_trained", "lr", "batch_tokens")
    numbers = {name: pd.to_numeric(runs[name], errors="coerce") for name in names}
    numbers["tokens per parameter"] = numbers["tokens_trained"] / numbers["params_total"]
    ranges = {
        name: (_number(values.min()), _number(values.max()))
        for name, values in ((name, values.dropna()) for name, values in numbers.items())
        if len(values)
    }
    texts = (
        "corpus",
        "task_group",
        "tokenizer",
        "norm",
        "init",
        "precision",
        "seed",
        "beta1",
        "beta2",
        "weight_decay_on",
    )
    texts += ("grad_clip", "warmup_frac", "vocab_size", "device", "optimizer")
    known = {name: {plain(value) for value in runs[name]} for name in texts if name in runs.columns}
    values = {name: tuple(map(str, sorted(every, key=_in_order))) for name, every in known.items() if every != {None}}
    depths = tuple(sorted(set(map(int, runs["n_layers"]))))
    return Domain(depths=depths, ranges=ranges, values=values)


def _in_order(value: Any) -> tuple[bool, float, str]:
    """Numbers by their size, before texts."""
    is_number = isinstance(value, int | float)
    return not is_number, float(value) if is_number else 0.0, str(value)


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else float(value)
