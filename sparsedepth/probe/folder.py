"""Security check of a third-party model folder, from its file names and JSON, before any of it is used.

Accepted is data only: config.json of a supported model type, weights in safetensors, a tokenizer in JSON. Refused, with
the reason: weights in formats that can run code (.bin, .pt, pickle), Python files, JSON that points to code or to
kernels of others (`auto_map`, `trust_remote_code`, `attn_implementation: someone/kernel` ...: CVE-2026-4372,
CVE-2026-5241), adapters, links out of the folder, and implausibly large headers. A key that only
selects one of the library's own kernels is none of these. Nothing loads a refused folder."""

import math
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sparsedepth.files import NotRegularError, open_regular, parse_json, read_regular, repository_of, unreadable
from sparsedepth.probe.hf_types import check_type
from sparsedepth.quantities.quantity import Named
from sparsedepth.words.plain_text import one_line

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"

MAX_JSON_BYTES = 10_000_000
MAX_WEIGHT_BYTES = 2**50
MAX_HEADER_BYTES = 100_000_000
"""The format's own limit; a model of a thousand experts per layer needs a tenth of it."""

COPY = "copy the model again from where it was made"
"""The fix for a folder that lacks a file or a part of one."""
COMPARE = "compare config.json with that of the original"
"""The fix for files that are whole, and do not fit together: a copy would be the same."""
QUANTISED = "quantised weights are not measured; use the original ones"

_UNSAFE_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle", ".msgpack", ".h5", ".npz")
_CODE = (".py", ".pyc", ".so", ".dll", ".dylib", ".ipynb")
_DATA = (".safetensors", ".json", ".yaml")
_SHARD = re.compile(r"[\w-][\w.-]*\.safetensors")
_POINTS_TO_CODE = re.compile(r"auto_map|remote_code|custom_(pipelines?|generate)|(?<!^cache)_implementation|kernel")
IMPLEMENTATION = re.compile(r"_?(attn|experts)_implementation(_internal|_autoset)?")
_OWN_KERNELS = {
    None, False, True, "eager", "sdpa", "flash_attention_2", "flash_attention_3", "flash_attention_4", "flex_attention",
    "batched_mm", "grouped_mm", "deepgemm",
}  # fmt: skip
"""Values of IMPLEMENTATION that name a part of transformers, not a repository."""
_PLAIN_PRIVATE_KEYS = {
    "_name_or_path", "_from_model_config", "_commit_hash", "_flash_attn_2_enabled", "_num_labels",
    "_sliding_window_pattern", "_remove_final_layer_norm",
}  # fmt: skip
"""Private keys that transformers wrote into configs or its users set, and that lead to no code of others."""
_MARKS = (("__type", "AddedToken"), ("__float__", "Infinity"))
"""Keys, with their values, of what JSON has not."""
_POSITIVE = re.compile(r"theta$|^rotary_emb_base$|^query_pre_attn_scalar$")
_NOT_NEGATIVE = re.compile(r"_(eps|epsilon)$")
"""Settings outside whose range a model computes NaN, or nothing that its family does."""
_SETTINGS = ("generation_config.json", "tokenizer_config.json", "special_tokens_map.json")


def check_folder(folder: Path) -> Named:
    """config.json of a folder that is safe to load. Raises ValueError, one line with the reason, for any other."""
    check_names(folder)
    config = read_json(folder / CONFIG)
    check_config(config, str(folder / CONFIG))
    for other in _SETTINGS:
        if (folder / other).exists():
            _check_plain(read_json(folder / other), str(folder / other))
    for weights in weight_files(folder):
        check_weights(weights)
    return config


def check_config(config: Named, source: str) -> None:
    """Raises ValueError for an unsupported model type, or a config that points to code."""
    check_type(config.get("model_type"), source)
    _check_plain(config, source)
    _check_numbers(config, source)


def read_json(path: Path) -> Named:
    """The object in a JSON file. Raises ValueError for a missing, oversized or broken file, or another value."""
    try:
        content = parse_json(read_regular(path, MAX_JSON_BYTES, repository_of(path.parent)))
    except NotRegularError as error:
        raise unreadable(path, error) from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {one_line(error)}; {COPY}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold an object, and holds a {type(content).__name__}; {COMPARE}")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: one, or the shards in its index."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        shards = read_json(folder / INDEX).get("weight_map")
        names = sorted(set(map(str, shards.values()))) if isinstance(shards, dict) else []
        for name in names or [""]:
            if not _SHARD.fullmatch(name) or not (folder / name).exists():
                raise ValueError(
                    f"{folder / INDEX} names the shard {name!r}, which is no safetensors file beside it; {COPY}"
                )
        return [folder / name for name in names]
    if unsafe := sorted(path.name for path in folder.iterdir() if path.suffix in _UNSAFE_WEIGHTS):
        raise ValueError(
            f"{folder} has weights only in {unsafe[0]!r}, a format that can run code when it is read; "
            f"convert them to {WEIGHTS} where they are trusted: "
            "AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(NEW)"
        )
    raise ValueError(f"{folder} has no weights: neither {WEIGHTS} nor {INDEX}; {COPY}")


def check_weights(path: Path) -> dict[str, str]:
    """The dtype of each tensor, as the file's header names it. Raises ValueError unless the header is valid: size,
    JSON, types, shapes and offsets."""
    from safetensors import SafetensorError, safe_open

    try:
        with open_regular(path, MAX_WEIGHT_BYTES, repository_of(path.parent)) as file:
            n_bytes, header = os.fstat(file.fileno()).st_size, int.from_bytes(file.read(8), "little")
        if n_bytes < 8 or header > min(n_bytes - 8, MAX_HEADER_BYTES):
            raise ValueError(f"it has {n_bytes:,} bytes and claims a header of {header:,}")
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name).get_dtype() for name in file.keys()}  # noqa: SIM118
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(
            f"{path} is not a valid safetensors file ({one_line(error)}); copy or export it again"
        ) from None


def check_names(folder: Path) -> None:
    """Raises ValueError for a link out of the folder, special files, code, and adapters."""
    inside = repository_of(folder).resolve()
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(inside):
            raise ValueError(f"{path} is a link out of the folder; copy the file itself there")
        if path.exists() and not path.is_file() and (path.suffix in _DATA or not path.is_dir()):
            raise ValueError(f"{path} is a folder, a pipe or a device, and should be a file; delete it")
        if path.suffix in _CODE:
            raise ValueError(
                f"{folder} brings code of its own ({path.name}), and nothing of a model folder is ever run; "
                f"delete it where transformers itself has the model, else export the model to a type that it has"
            )
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} is an adapter (adapter_config.json) to another model; merge it into that one first")


def _check_plain(content: Any, source: str) -> None:
    """Raises ValueError for a key, at any depth, that points to code or kernels."""
    for key, value in _entries(content):
        if not _is_plain(key, value):
            raise ValueError(
                f"{source} has the key {key!r}, which can make a library run code from elsewhere; "
                "delete it where the model needs none"
            )


def _is_plain(key: str, value: Any) -> bool:
    """Whether a key leads to nothing but the library and the folder's data: also a token as older files mark it, and a
    number, such as the size of a kernel."""
    if IMPLEMENTATION.fullmatch(key):
        return isinstance(value, str | bool | None) and value in _OWN_KERNELS
    if key.startswith("_"):
        return key in _PLAIN_PRIVATE_KEYS or (key, value) in _MARKS
    is_size = "kernel" in key and (value in (None, False) or type(value) in (int, float))
    return is_size or not _POINTS_TO_CODE.search(key)


def _check_numbers(content: Any, source: str) -> None:
    """Raises ValueError for a number with which a model computes only NaN."""
    for key, value in _entries(content):
        for number in value if isinstance(value, list) else (value,):
            if not isinstance(number, float | int) or isinstance(number, bool):
                continue
            if not math.isfinite(number):
                raise ValueError(f"{source} has {key}={number}, which is not finite; fix it there")
            if number <= 0 and _POSITIVE.search(key):
                raise ValueError(f"{source} has {key}={number:g}, which must be above 0; fix it there")
            if number < 0 and _NOT_NEGATIVE.search(key):
                raise ValueError(f"{source} has {key}={number:g}, which must be 0 or more; fix it there")


def _entries(content: Any) -> Iterator[tuple[str, Any]]:
    """Keys and values of all objects in a JSON value. Iterative, not recursive: the file may be deeply nested."""
    stack = [content]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            yield from value.items()
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)
