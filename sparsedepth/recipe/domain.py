"""The domain of a recipe: the values that its runs cover, outside of which they are no evidence."""

from collections.abc import Sequence

import pandas as pd

from sparsedepth.config.images import unit_for
from sparsedepth.effects.knobs import plain, value_order
from sparsedepth.recipe.card import Domain

NUMBERS = ("n_layers", "d_model", "seq_len", "params_total", "params_active", "tokens_trained", "lr", "batch_tokens")
CHOICES = ("corpus", "task_group", "tokenizer", "precision", "optimizer", "device")


def domain_of(runs: pd.DataFrame) -> Domain:
    """The range of every number and the values of every choice that bounds the evidence."""
    numbers = {name: pd.to_numeric(runs[name], errors="coerce").dropna() for name in NUMBERS}
    ranges = {name: (_number(x.min()), _number(x.max())) for name, x in numbers.items() if len(x)}
    distinct = {name: {plain(value) for value in runs[name].unique()} for name in CHOICES if name in runs.columns}
    values = {name: tuple(map(str, sorted(each, key=value_order))) for name, each in distinct.items() if each != {None}}
    return Domain(ranges=ranges, values=values)


def _number(value: float) -> int | float:
    return int(value) if float(value).is_integer() else float(value)


def domain_texts(domain: Domain) -> list[tuple[str, str]]:
    """(name, its values or its range)"""
    ranges = [
        (name, " to ".join(dict.fromkeys(f"{end:,.12g}" for end in ends))) for name, ends in domain.ranges.items()
    ]
    return [*ranges, *((name, ", ".join(values)) for name, values in domain.values.items())]


def seen_on(domain: Domain) -> str:
    """'task state_tracking S5, width 32, 223k to 696k parameters, 288k tokens, CPU'."""
    corpora = domain.values.get("corpus", ())
    tasks = [name.removeprefix("task:") for name in corpora if name.startswith("task:")]
    are_tasks, are_images = len(tasks) == len(corpora) > 0, unit_for("/token", corpora) == "/image"
    groups = ", ".join(group for group in domain.values.get("task_group", ()) if group != "None")
    of_group = f"{' ' if len(tasks) == 1 else ' of '}{groups}" if are_tasks and groups else ""
    data = f"task {', '.join(tasks)}{of_group}" if are_tasks else f"corpus {', '.join(corpora) or 'unknown'}"
    texts = {"d_model": "width {}", "params_total": "{} parameters", "tokens_trained": "{} tokens"}
    ranges = dict(domain.ranges)
    if are_images and "tokens_trained" in ranges and len({*ranges.get("seq_len", ())}) == 1:
        (low, high), (patches, _) = ranges["tokens_trained"], ranges["seq_len"]
        texts["tokens_trained"], ranges["tokens_trained"] = "{} images", (low / patches, high / patches)
    sizes = [text.format(_from_to(ranges[name])) for name, text in texts.items() if name in ranges]
    hardware = [", ".join(_devices(domain.values["device"]))] if "device" in domain.values else []
    return ", ".join([data, *sizes, *hardware])


def _devices(names: Sequence[str]) -> list[str]:
    """'CPU' of 'cpu (x86_64)'."""
    short_names = (name.partition(" (")[0] for name in names)
    return list(dict.fromkeys(name.upper() if name in ("cpu", "mps") else name for name in short_names))


def _from_to(ends: tuple[int | float, int | float]) -> str:
    return " to ".join(dict.fromkeys(map(short, ends)))


def short(value: float) -> str:
    """'288k', '1.3M'."""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"
