"""The page of an exported run (`exchange.export`)."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING

from sparsedepth import quantities
from sparsedepth.quantities.quantity import Row
from sparsedepth.words.plain_text import commas

if TYPE_CHECKING:
    from sparsedepth.config.model import ModelConfig
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
        f"{commas(f'{value:.1e} on {name}' for name, value in parity.items())}.",
        "\n".join(f"- {note}." for note in exported.notes),
        "## Scores",
        _scores(summary),
        "## Configuration",
        _fenced("yaml", _lines(config.model_dump(mode="json"))),
        "## Origin",
        _fenced("yaml", _lines({"run_id": config.run_id, **origin, "exported_with": versions})),
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def export_notes(config: "ModelConfig", family: str, has_pairs: bool) -> tuple[str, ...]:
    """What is folded into the weights, and other notes for users of the weights."""
    misaligned = [f"{name}={size}" for name in ("d_model", "d_expert") if (size := getattr(config, name) or 0) % 8]
    place = "the norms after the branches" if family == "gemma2" else "the output projections"
    # fmt: off
    folded = (
        (config.depth_scale == "lns", "LayerNorm Scaling (1/sqrt(layer)) is folded into the weights of the norms"),
        (config.depth_scale.startswith(("after_branch", "after_attention", "after_ffn")),
         f"depth_scale={config.depth_scale} (1/sqrt(layer)) is folded into {place}"),
        (config.depth_scale == "before_norm",
         "depth_scale=before_norm is left out: a norm undoes it, except for epsilon, here norm_eps in every layer "
         "and norm_eps x layer in the run"),
        (config.parametrisation != "standard",
         f"factors of parametrisation={config.parametrisation} are folded into weights"),
        (config.residual_gate != "none", f"residual_gate={config.residual_gate} is folded into {place}"),
        (config.drops, "dropout is left out: further training would be without"),
        (config.norm == "peri", "the norm of the embedding is folded into its rows"),
        (has_pairs,
         "trained on prompts and answers, several in a sequence with separate attention: use one at a time"),
        (family == "gemma2", "Gemma-2 represents sandwich norms, with our activation and without its attention cap"),
        (family == "gemma2" and config.tie_embeddings, "the tied head is a separate matrix here"),
        (config.n_shared_experts > 0,
         "the shared expert's gate is 0, which halves it, and its output projection is doubled"),
        (family in ("qwen2_moe", "qwen3_moe"), f"{family} represents experts that Mixtral cannot express"),
        (config.n_experts > 0 and bool(misaligned),
         f"{' and '.join(misaligned)}: the experts' kernel that transformers chooses needs multiples of 8 (of 4 in "
         "fp32); where it fails, load with experts_implementation='eager'"),
    )
    # fmt: on
    return tuple(note for applies, note in folded if applies)


def _lines(values: Row) -> str:
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


def _scores(summary: Row) -> str:
    text = "| score | value | 95% interval | unit |\n|---|---|---|---|"
    for column, value, ends in quantities.with_intervals(summary):
        if not isinstance(value, bool | str):
            interval = f"{ends[0]:.4g} to {ends[1]:.4g}" if ends else ""
            number = f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
            text += f"\n| {column.name} | {number} | {interval} | {column.unit} |"
    return text
