"""Where a recipe comes from: its domain, beyond which its runs are no evidence; and the provenance of its card: runs,
manifests, code, kernels, data, cost, and the command that reproduces it."""

import hashlib
import shlex
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from sparsedepth.config.corpus import unit_for
from sparsedepth.files import digest, parse_json
from sparsedepth.recipe.card import Provenance, Recipe
from sparsedepth.store.find import read_file

SCALES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def seen_on(runs: pd.DataFrame) -> str:
    """'task state_tracking S5, width 32, 223k to 696k parameters, 288k tokens, CPU'."""
    corpora = _distinct(runs, "corpus")
    tasks = [name.removeprefix("task:") for name in corpora if name.startswith("task:")]
    are_tasks, are_images = len(tasks) == len(corpora) > 0, unit_for("/token", corpora) == "/image"
    groups = ", ".join(_distinct(runs, "task_group"))
    of_group = f"{' ' if len(tasks) == 1 else ' of '}{groups}" if are_tasks and groups else ""
    data = f"task {', '.join(tasks)}{of_group}" if are_tasks else f"corpus {', '.join(corpora) or 'unknown'}"
    columns = runs[["d_model", "params_total", "tokens_trained", "seq_len"]]
    width, params, tokens, seq_len = (pd.to_numeric(columns[name], errors="coerce") for name in columns)
    sizes = {"width {}": width, "{} parameters": params}
    sizes |= {"{} images": tokens / seq_len} if are_images else {"{} tokens": tokens}
    texts = [text.format(_range(values)) for text, values in sizes.items() if values.notna().any()]
    devices = [name.partition(" (")[0] for name in _distinct(runs, "device")]
    devices = dict.fromkeys(name.upper() if name in ("cpu", "mps") else name for name in devices)
    return ", ".join([data, *texts, *devices])


def _distinct(runs: pd.DataFrame, name: str) -> list[str]:
    return sorted(map(str, runs[name].dropna().unique())) if name in runs.columns else []


def _range(values: pd.Series) -> str:
    """'288k to 1.3M'."""
    texts = []
    for value in (values.min(), values.max()):
        scale, letter = next((each for each in SCALES if abs(value) >= each[0]), (1, ""))
        texts.append(f"{value / scale:.3g}{letter}")
    return " to ".join(dict.fromkeys(texts))


def provenance_of(runs: pd.DataFrame, used: pd.DataFrame, recipe: Recipe, folders: Sequence[Path]) -> Provenance:
    """The runs used, facts from their manifests, and the hours of all runs of the store, tuning included."""
    names = [str(folder) for folder in folders]
    manifests = [manifest_of(folder) for folder in used["folder"]] if "folder" in used.columns else []
    contents = [content for content in manifests if content is not None]
    is_complete = bool(contents) and len(contents) == len(manifests)
    facts = [manifest_facts(content) for content in contents] if is_complete else []
    hours: dict[str, float] = {}
    if {"device", "seconds"} <= {*runs.columns}:
        seconds = pd.to_numeric(runs["seconds"], errors="coerce").fillna(0.0)
        hours = {str(name): float(total) / 3600 for name, total in seconds.groupby(runs["device"]).sum().items()}
    on_nodes = runs["node_hours"].dropna() if "node_hours" in runs.columns else []
    options = f"--depth {recipe.depth} --objective {recipe.objective} --matched {recipe.matched}"
    paths = shlex.join(names) or "DIR"
    return Provenance(
        folders=names,
        run_ids=sorted(used["run_id"]),
        seeds=sorted(set(map(int, used["seed"].dropna()))),
        manifests=digest(sorted(hashlib.sha256(content).hexdigest() for content in contents)) if is_complete else None,
        code=sorted({fact["code"] for fact in facts if "code" in fact}),
        kernels=sorted({fact["kernels"] for fact in facts if "kernels" in fact}),
        data=sorted({fact["data hash"] for fact in facts if "data hash" in fact}),
        hours=hours,
        node_hours=float(sum(on_nodes)) if len(on_nodes) else None,
        command=f"sparsedepth recipe {paths} {options}",
    )


def manifest_of(folder: object) -> bytes | None:
    """The manifest of a run's folder, packed or not; None where there is none."""
    try:
        return read_file(Path(str(folder)), "manifest.json")
    except OSError:
        return None


def manifest_facts(content: bytes | None) -> dict[str, str]:
    """Code version, kernels, data hash and packages, as far as a run's manifest has them."""
    try:
        manifest = parse_json(content or b"null")
    except ValueError:
        return {}
    if not isinstance(manifest, dict):
        return {}
    code, kernels, packages, data = (
        part if isinstance(part := manifest.get(name), dict) else {} for name in ("code", "kernels", "packages", "data")
    )
    commit = f", commit {code['commit']}" if code.get("commit") else ""
    facts = {
        "code": f"sparsedepth {code.get('version')}{commit}" if code else "",
        "kernels": ", ".join(f"{name} {value}" for name, value in kernels.items() if isinstance(value, str) and value),
        "data hash": data.get("data_hash") or manifest.get("data_hash"),
        "packages": ", ".join(f"{name} {value}" for name, value in packages.items() if value),
    }
    if commit and code.get("changed"):
        facts["code"] += " with uncommitted changes"
    return {name: value for name, value in facts.items() if isinstance(value, str) and value}
