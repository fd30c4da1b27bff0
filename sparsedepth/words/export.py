"""The page of an exported run (`exchange.export`)."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from sparsedepth import quantities

if TYPE_CHECKING:
    from sparsedepth.exchange.architecture import Architecture
    from sparsedepth.store.run_record import Record


def export_card(
    run: "Record", exported: "Architecture", parity: Mapping[str, float], versions: Mapping[str, str]
) -> str:
    """README.md, with the largest difference of a logit on each input by name. Every value of the run is JSON on a line
    of its own, so that none can inject markup."""
    config = run.config
    summary = run.summary
    kinds = "AutoModelForCausalLM, AutoTokenizer"
    manifest_fields = ("code", "started", "seconds", "device", "data_hash", "packages")
    origin = {name: run.manifest.get(name) for name in manifest_fields}
    front_matter = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["sparsedepth"],
        "run_id": config.run_id,
        "logit_parity": max(parity.values()),
    }
    sections = [
        f"---\n{_lines(front_matter)}\n---",
        f"# sparsedepth run {config.run_id}",
        f"{config.n_layers} layers, d_model {config.d_model}, {summary['params_total']:,} parameters, as a "
        f"`{exported.family}` model of transformers; no code of its own. It was trained to study depth and "
        "sparsity, not for use.",
        _fenced(
            "python",
            f"from transformers import {kinds}\n\n"
            f'model, tokenizer = (kind.from_pretrained("FOLDER") for kind in ({kinds}))',
        ),
        "## Parity with the run",
        f"Largest difference of a logit between this folder, loaded again by transformers {versions['transformers']}, "
        "and the run's own model, in fp32, relative to the largest logit of its sequence, or to 1: "
        f"{', '.join(f'{value:.1e} on {name}' for name, value in parity.items())}.",
        "\n".join(f"- {note}." for note in exported.notes),
        "## Scores",
        _scores(summary),
        "## Configuration",
        _fenced("yaml", _lines(config.model_dump(mode="json"))),
        "## Origin",
        _fenced("yaml", _lines({"run_id": config.run_id, **origin, "exported_with": versions})),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _lines(values: Mapping[str, Any]) -> str:
    """`name: value` lines with JSON values, valid as YAML 1.1 (which reads 1e-06 as text)."""
    lines = []
    for name, value in values.items():
        text = json.dumps(value)
        if isinstance(value, float) and "." not in text:
            text = text.replace("e", ".0e")
        lines.append(f"{name}: {text}")
    return "\n".join(lines)


def _fenced(language: str, text: str) -> str:
    return f"```{language}\n{text}\n```"


def _scores(summary: Mapping[str, Any]) -> str:
    rows = ["| score | value | 95% interval | unit |", "|---|---|---|---|"]
    for column, value, ends in quantities.with_intervals(summary):
        if not isinstance(value, bool | str):
            interval = f"{ends[0]:.4g} to {ends[1]:.4g}" if ends else ""
            number = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
            rows.append(f"| {column.name} | {number} | {interval} | {column.unit} |")
    return "\n".join(rows)
