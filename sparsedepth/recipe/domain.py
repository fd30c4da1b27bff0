"""The domain of a recipe: the values that its runs cover, outside of which they are no evidence."""

import pandas as pd

from sparsedepth.effects.knobs import plain, value_order
from sparsedepth.recipe.card import Domain


def domain_of(runs: pd.DataFrame) -> Domain:
    """The range of every number and the values of every choice that bounds the evidence."""
    names = ("n_layers", "d_model", "seq_len", "params_total", "params_active", "tokens_trained", "lr", "batch_tokens")
    numbers = {name: pd.to_numeric(runs[name], errors="coerce") for name in names}
    numbers["tokens per parameter"] = numbers["tokens_trained"] / numbers["params_total"]
    ranges = {
        name: (_number(values.min()), _number(values.max()))
        for name, values in ((name, values.dropna()) for name, values in numbers.items())
        if len(values)
    }
    choices = ("corpus", "task_group", "tokenizer", "norm", "init", "precision", "seed", "beta1", "beta2")
    choices += ("weight_decay_on", "grad_clip", "warmup_frac", "vocab_size", "device", "optimizer")
    distinct = {name: {plain(value) for value in runs[name]} for name in choices if name in runs.columns}
    values = {name: tuple(map(str, sorted(each, key=value_order))) for name, each in distinct.items() if each != {None}}
    depths = tuple(sorted(set(map(int, runs["n_layers"]))))
    return Domain(depths=depths, ranges=ranges, values=values)


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else float(value)
