"""Rules for the parts of a sweep definition (sweep: a SweepDefinition) that must fit together.

Each field varies in one place; a grid is finite; a sampler has a space to search and nothing that it would ignore.
"""

from typing import Any, get_args

from sparsedepth.config.run import RunConfig
from sparsedepth.config.space import Interval


def check_sweep(sweep: Any) -> None:
    """Raise ValueError for the first rule that a definition breaks."""
    _check_varied_once(sweep)
    _check_zip(sweep)
    if sweep.branch_at and sweep.sampler != "grid":
        raise ValueError(f"branch_at={sweep.branch_at} needs sampler 'grid', whose cells are known; leave it out")
    if sweep.sampler == "grid":
        _check_grid(sweep)
    else:
        _check_sampled(sweep)
    if sweep.free and sweep.matched in ("tokens", "steps"):
        raise ValueError(f"free={sweep.free!r} is solved for parameters or FLOPs; matched is {sweep.matched!r}")
    if sweep.free == "train_tokens" and sweep.matched not in ("flops", "time"):
        raise ValueError(f"free='train_tokens' changes FLOPs, not {sweep.matched}; use matched: flops, or free: d_ff")
    if sweep.matched == "time" and (sweep.across, sweep.free) != ("depth", "train_tokens"):
        raise ValueError("matched='time' compares the steps of depths; add across: depth, free: train_tokens")
    if sweep.across and sweep.matched in ("tokens", "steps"):
        told = f"across: depth has no meaning with matched={sweep.matched!r}"
        raise ValueError(f"{told}; use matched: flops, or leave it out")


def _check_varied_once(sweep: Any) -> None:
    if any("preset" in place for place in (sweep.space, sweep.tune, *sweep.zip, *sweep.only.values(), *sweep.exclude)):
        raise ValueError("preset stands for many fields: set it in the base, in variants or in cells")
    if "preset" in sweep.base and any("preset" in entry for entry in (*sweep.variants, *sweep.cells)):
        told = f"preset={sweep.base['preset']!r} of the base conflicts with presets in variants or cells"
        raise ValueError(f"{told}; set it only in these")
    for name in sweep.only:
        if name not in sweep.space:
            raise ValueError(f"only.{name} needs an axis {name!r} in the space")
    axes = [*sweep.space, *(name for axis in sweep.zip for name in axis)]
    varied = [*axes, *sweep.tune, *([sweep.free] if sweep.free else [])]
    repeated = {name for name in varied if varied.count(name) > 1}
    repeated |= {name for place in (*sweep.variants, *sweep.cells) for name in place if name in sweep.tune}
    repeated |= {name for place in sweep.variants for name in place if name in axes}
    repeated |= {name for place in sweep.places() for name in place if name == sweep.free}
    if repeated:
        raise ValueError(f"{', '.join(sorted(repeated))} must vary in one place: space, zip, variants, tune or free")
    for condition in (*sweep.only.values(), *sweep.exclude):
        for name in condition:
            if name in ("seed", sweep.free, *sweep.tune):
                raise ValueError(f"only and exclude select cells, whose {name} is not known yet; leave it out there")


def _check_zip(sweep: Any) -> None:
    """Zipped fields must have the same length, and the first field distinct values."""
    for axis in sweep.zip:
        lengths = {name: len(values) for name, values in axis.items()}
        if len(lengths) < 2 or len(set(lengths.values())) > 1:
            raise ValueError(f"zip: {lengths} must be two fields or more with equally many values")
        name, values = next(iter(axis.items()))
        if len(set(values)) < len(values):
            raise ValueError(f"zip.{name}={values} must not repeat a value: the first field names the point")


def _check_grid(sweep: Any) -> None:
    if sweep.n_trials is not None:
        raise ValueError(f"n_trials={sweep.n_trials} has no meaning with sampler 'grid', which runs every cell")
    if sweep.prune:
        raise ValueError("prune needs another sampler; sampler 'grid' runs every cell to its end")
    for name, axis in sweep.space.items():
        if isinstance(axis, Interval):
            raise ValueError(f"space.{name} is a range; sampler 'grid' needs a list of values")


def _check_sampled(sweep: Any) -> None:
    if sweep.n_trials is None or not sweep.axes:
        raise ValueError(f"sampler {sweep.sampler!r} needs n_trials and a space to search")
    if sweep.variants != [{}] or sweep.cells:
        raise ValueError(f"variants and cells need sampler 'grid'; {sweep.sampler!r} proposes from the axes")
    for name, axis in sweep.space.items():
        if isinstance(axis, Interval) and not axis.whole and _is_whole(name):
            raise ValueError(f"space.{name} is a range with fractions, and {name} is an integer; add whole: true")
    if sweep.free or sweep.matched not in ("tokens", "steps"):
        raise ValueError(f"matched={sweep.matched!r} needs sampler 'grid'; with {sweep.sampler!r} use tokens or steps")
    if sweep.tune and sweep.adaptive:
        raise ValueError(f"tune does not go with sampler {sweep.sampler!r}: put {', '.join(sweep.tune)} in its space")


def _is_whole(name: str) -> bool:
    """Whether the values of a field of a run are integers (or None)."""
    annotation = RunConfig.model_fields[name].annotation if name in RunConfig.model_fields else None
    return int in {getattr(part, "__origin__", part) for part in (annotation, *get_args(annotation))}
