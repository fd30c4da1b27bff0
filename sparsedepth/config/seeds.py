"""Seeds in a sweep definition: a list, or a number of seeds counted from 0 (results) or from 101 (tuning)."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from sparsedepth.config.space import check_size


def _counted(first: int) -> Callable[[Any], Any]:
    """A validator that turns a number of seeds into a list from `first` on: 3 from 0 are 0, 1 and 2."""

    def listed(seeds: Any) -> Any:
        if not isinstance(seeds, int) or isinstance(seeds, bool):
            return seeds
        if seeds < 1:
            raise ValueError(f"must be 1 or more, the number of seeds from {first}")
        check_size(1, seeds)
        return list(range(first, first + seeds))

    return listed


Seeds = Annotated[list[int], Field(min_length=1), BeforeValidator(_counted(0), json_schema_input_type=int | list[int])]
TuningSeeds = Annotated[
    list[int], Field(min_length=1), BeforeValidator(_counted(101), json_schema_input_type=int | list[int])
]
_SEEDS = TypeAdapter(Seeds, config=ConfigDict(defer_build=True))


def own_seeds(entry: Mapping[str, Any], default: list[int]) -> list[int]:
    """The seeds of a variant or a listed cell. Raises ValueError."""
    if "seeds" not in entry:
        return default
    try:
        return _SEEDS.validate_python(entry["seeds"], strict=True)
    except ValidationError:
        raise ValueError(f"seeds={entry['seeds']!r} must be a list of seeds, or their number, from 0") from None
