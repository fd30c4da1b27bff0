"""`sparsedepth presets`: the models of the papers, what they cost, and the fields that each one sets."""

from typing import Annotated, Any

import typer


def presets(name: Annotated[str | None, typer.Argument(help="print this one's fields, as a run file")] = None) -> None:
    """List the papers' models, for `preset: NAME` in a run file or a sweep's base."""
    from sparsedepth.config.presets import PRESETS, find

    if name is None:
        _print_table(PRESETS)
    else:
        _print_fields(name, find(name))


def _print_table(known: dict[str, Any]) -> None:
    from sparsedepth.config.cost import cost
    from sparsedepth.config.load import build
    from sparsedepth.config.run import RunConfig
    from sparsedepth.store.query_result import QueryResult
    from sparsedepth.store.render import render

    rows: list[tuple[Any, ...]] = []
    for name, preset in known.items():
        config = build(RunConfig, preset.fields, f"preset {name}")
        counted = cost(config)
        tokens = config.train_tokens if "train_tokens" in preset.fields else None
        sizes = (config.n_layers, config.d_model, counted.params_total, counted.params_active)
        rows.append((name, *sizes, tokens, config.lr, preset.source))
    columns = ("preset", "n_layers", "d_model", "params_total", "params_active", "train_tokens", "lr", "source")
    print(render(QueryResult(columns, tuple(rows))))


def _print_fields(name: str, preset: Any) -> None:
    from sparsedepth.config.load import yaml_text

    print(f"# {name}: {preset.source}")
    if preset.note:
        print(f"# {preset.note}")
    print(yaml_text({"preset": name, **preset.fields}), end="")
