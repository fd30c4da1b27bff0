"""How configurations differ from the baseline (`store.setting`)."""

from collections.abc import Container
from typing import TYPE_CHECKING

from sparsedepth.quantities.quantity import Row
from sparsedepth.words.plain_text import commas
from sparsedepth.words.values import assignment, readable

if TYPE_CHECKING:
    from sparsedepth.store.setting import Progress, Settings


def setting_label(settings: "Settings", knobs: Row) -> str:
    """'n_kv_heads=1, depth_scale=lns': the fields that differ from the baseline; 'baseline' where none does. The budget
    is named in each: 'baseline, train_tokens=6400'."""
    texts = [assignment(name, value) for name, value in settings.named(knobs).items()]
    has_budget = settings.budget in settings.label_fields and settings.budget in knobs
    budget = [assignment(settings.budget, knobs[settings.budget])] if has_budget else []
    return commas([*(texts or ["baseline"]), *budget])


def baseline_text(settings: "Settings") -> str:
    """'baseline: n_kv_heads=2, depth_scale=none', its values of the fields that labels name; empty without any, and of
    models that were only measured."""
    if settings.baseline.model:
        return ""
    known = {name: settings.baseline.knobs[name] for name in settings.label_fields if name != settings.budget}
    values = commas(assignment(name, value) for name, value in known.items() if value is not None)
    return f"baseline: {values}" if values else ""


def data_text(settings: "Settings") -> str:
    """A warning where the configurations were trained on different data."""
    names = commas(settings.data)
    return f"configurations differ in {names}: losses on different data are not comparable" if names else ""


def depth_text(settings: "Settings") -> str:
    """'train_tokens depends on n_layers: 1347584 at 4, 6389760 at 24', a line per field."""
    values = {
        name: commas(f"{readable(size)} at {depth}" for depth, size in sizes.items())
        for name, sizes in settings.by_depth.items()
    }
    return "\n".join(f"{name} depends on n_layers: {text}" for name, text in values.items())


def cost_text(settings: "Settings", columns: Container[str]) -> str:
    """'params, flops (training): relative to the baseline (124128, 6.393e+11)'; '' without one."""
    baseline = settings.baseline
    costs = {"params": ("params", baseline.params), "flops": ("flops (training)", baseline.flops)}
    shown = {name: value for column, (name, value) in costs.items() if column in columns and value}
    depth = f" with {baseline.knobs['n_layers']} layers" if "n_layers" in settings.varying else ""
    references = commas(map(readable, shown.values()))
    return f"{commas(shown)}: relative to {baseline.model or 'the baseline'}{depth} ({references})" if shown else ""


def pending_text(progress: "Progress | None") -> str:
    """'pending: 5 of the 8 planned runs are not complete'; '' for None."""
    if progress is None:
        return ""
    n_left = progress.n_planned - progress.n_complete
    return f"pending: {n_left} of the {progress.n_planned} planned runs are not complete (sparsedepth status)"


def only_tuning_text(progress: "Progress | None") -> str:
    """'only tuning runs are complete so far (3 of 30)'; '' for None."""
    if progress is None:
        return ""
    planned = f" of {progress.n_planned}" if progress.n_planned >= progress.n_complete else ""
    return f"only tuning runs are complete so far ({progress.n_complete}{planned})"
