"""The sizes of a sweep definition: the same question with other values (`scales`)."""

from typing import Any

from pydantic import model_validator

from sparsedepth.config.section import Count, Positive, Section, Sentence
from sparsedepth.config.space import Axis, Bounded, Condition, Seeds, Shares, TuneGrid, TuningSeeds, Value, Values
from sparsedepth.quantities.quantity import Named

Zip = list[dict[str, Values]]


class Tuned(Section):
    """A section with `tune`, whose `at` is the field `tune_at`."""

    @model_validator(mode="before")
    @classmethod
    def _split_tune(cls, values: Any) -> Any:
        tune = values.get("tune") if isinstance(values, dict) else None
        if not isinstance(tune, dict) or "at" not in tune:
            return values
        at = tune["at"]
        if not isinstance(at, dict) or not all(isinstance(value, Value) for value in at.values()):
            raise ValueError(f"tune.at={at} must be one shape, such as {{n_layers: 12, d_model: 64}}")
        grids = {name: grid for name, grid in tune.items() if name != "at"}
        return {**values, "tune": grids, "tune_at": at}


class Scale(Tuned):
    """Changes that turn the definition into one of another size."""

    question: Sentence | None = None
    hypothesis: Sentence | None = None
    cost: str = ""
    base: Named = {}
    space: dict[str, Axis] | None = None
    zip: Zip | None = None
    variants: list[Named] | None = None
    cells: list[Named] | None = None
    exclude: list[Condition] | None = None
    only: dict[str, Condition] | None = None
    branch_at: Shares | None = None
    tune: dict[str, TuneGrid] | None = None
    tune_at: dict[str, Value] | None = None
    constraints: dict[Bounded, Positive] | None = None
    tuning_seeds: TuningSeeds | None = None
    seeds: Seeds | None = None
    n_trials: Count | None = None
