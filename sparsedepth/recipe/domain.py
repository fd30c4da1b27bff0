"""The domain of a recipe: data, sizes and devices of its runs, beyond which they are no evidence."""

import pandas as pd

from sparsedepth.config.corpus import unit_for


def seen_on(runs: pd.DataFrame) -> str:
    """'task state_tracking S5, width 32, 223k to 696k parameters, 288k tokens, CPU'."""
    corpora = _distinct(runs, "corpus")
    tasks = [name.removeprefix("task:") for name in corpora if name.startswith("task:")]
    are_tasks, are_images = len(tasks) == len(corpora) > 0, unit_for("/token", corpora) == "/image"
    groups = ", ".join(_distinct(runs, "task_group"))
    of_group = f"{' ' if len(tasks) == 1 else ' of '}{groups}" if are_tasks and groups else ""
    data = f"task {', '.join(tasks)}{of_group}" if are_tasks else f"corpus {', '.join(corpora) or 'unknown'}"
    tokens = pd.to_numeric(runs["tokens_trained"], errors="coerce")
    budget = tokens / pd.to_numeric(runs["seq_len"], errors="coerce") if are_images else tokens
    sizes = {
        "width {}": runs["d_model"],
        "{} parameters": runs["params_total"],
        "{} images" if are_images else "{} tokens": budget,
    }
    texts = [text.format(_range(values)) for text, values in sizes.items() if values.notna().any()]
    devices = [name.partition(" (")[0] for name in _distinct(runs, "device")]
    devices = dict.fromkeys(name.upper() if name in ("cpu", "mps") else name for name in devices)
    return ", ".join([data, *texts, *devices])


def _distinct(runs: pd.DataFrame, name: str) -> list[str]:
    return sorted(map(str, runs[name].dropna().unique())) if name in runs.columns else []


def _range(values: pd.Series) -> str:
    values = pd.to_numeric(values, errors="coerce")
    return " to ".join(dict.fromkeys(map(short, (float(values.min()), float(values.max())))))


def short(value: float) -> str:
    """'288k', '1.3M'."""
    for scale, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= scale:
            return f"{value / scale:.3g}{letter}"
    return f"{value:.3g}"
