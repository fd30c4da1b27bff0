"""Loading a model to measure: a run folder, a local Hugging Face folder, or a name on the hub.

Weights come from safetensors only, and no code of a folder is run (`sparsedepth.probe.folder`). Layers keep the dtype
of the weights in the files, whatever config.json says, unless fp32 is requested, and are computed in fp32; embedding,
final norm and head are always held in fp32. Both give the same numbers, except for Gemma, whose embedding scale is a
constant in the dtype of the weights, as in training (55.5 instead of 55.4256 at width 3072 in bf16)."""

import math
import re
import warnings
from collections import deque
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, reduce
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from sparsedepth.config.load import read_yaml
from sparsedepth.config.run import RunConfig, stored_config
from sparsedepth.files import MARKER, digest, local_path, sha256
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.folder import (
    COMPARE,
    CONFIG,
    IMPLEMENTATION,
    QUANTISED,
    WEIGHTS,
    check_config,
    check_folder,
    check_names,
    check_weights,
    read_json,
    weight_files,
)
from sparsedepth.probe.fork import probing, stream
from sparsedepth.probe.hf_types import EXPERTS, TYPES
from sparsedepth.probe.probed_model import ProbedDecoder, ProbedModel
from sparsedepth.quantities.quantity import Named
from sparsedepth.store.run_record import refuse_several_runs

if TYPE_CHECKING:  # of transformers, which a run of ours does not need
    from sparsedepth.probe.hf_adapter import ProbedHfModel

RUN_CONFIG = "config.yaml"
OLDEST_TRANSFORMERS = (5, 17)
"""Releases before 5.3 can be made to run code by a config.json (CVE-2026-4372); the adapter is tested from 5.17 on."""

Dtype = Literal["checkpoint", "fp32"]

SIZES = ("n_layers", "d_model", "n_heads", "n_kv_heads", "n_experts", "vocab_size")

_KV_HEADS = ("num_key_value_heads", "num_kv_heads")
_HUB_NAME = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?(@[\w-][\w./-]*)?")
_HUB_FILES = ("*.json", "*.safetensors", "merges.txt")
_BUFFERS = re.compile(r"(^|\.)(inv_freq|masked_bias|attn\.bias|attention\.bias)$")
"""Constants in older checkpoints that models no longer read."""
_IN_LAYER = re.compile(r"(^|\.)(layers|h)\.\d+\.")
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Of weights that are numbers by themselves, by their name in safetensors."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """A model's properties as shown in tables; None if it has no such property."""

    family: str
    """'sparsedepth' for a run folder, else the config's model_type"""
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    n_experts: int
    """0 = dense"""
    vocab_size: int
    max_len: int | None
    params_total: int
    dtype: str
    """of the layers' weights"""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedModel:
    source: str
    folder: Path
    weights: list[Path]
    """the files"""
    probed: ProbedModel
    facts: Facts
    config: RunConfig | None
    """of a run folder"""

    @cached_property
    def weights_hash(self) -> str:
        """12 hex digits: a digest of the weight files."""
        return digest([sha256(path) for path in self.weights])


def load_model(
    source: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: Dtype = "checkpoint",
    downloads: Path | None = None,
    memory: float | None = None,
) -> LoadedModel:
    """The model that `source` names; one of the hub that its cache has not is downloaded there, or to `downloads`.
    Where the weights are larger than `memory` bytes, each layer is moved to the device when it runs, from the files.
    Raises ValueError, one line with the reason, if it is missing or unsafe."""
    folder = local_path(source)
    if (folder / RUN_CONFIG).exists():
        return _load_run(str(source), folder, device)
    if (folder / CONFIG).exists():
        return _load_hf(str(source), folder, device, dtype, memory)
    refuse_several_runs(folder)
    if str(source) and folder.exists():
        fix = "name its checkpoints by --revisions '*'" if any(folder.glob(f"*/{CONFIG}")) else "copy the model again"
        if folder.is_file():
            own_code = "measure a model of your own code by sparsedepth.watch (docs/watching.md)"
            fix = f"name its folder, {folder.parent}" if (folder.parent / CONFIG).exists() else own_code
        raise ValueError(f"{str(source)!r} has neither {RUN_CONFIG} (a run) nor {CONFIG} (a Hugging Face model); {fix}")
    check_hub_name(str(source))
    name, _, revision = str(source).partition("@")
    return _load_hf(str(source), _download(name, revision or None, downloads), device, dtype, memory)


def check_hub_name(source: str) -> None:
    """Raises ValueError for what is no name on a hub."""
    if not _HUB_NAME.fullmatch(source):
        raise ValueError(
            f"model {source!r} is neither a folder, with {RUN_CONFIG} (a run) or {CONFIG} (a Hugging Face model), nor "
            "a hub's name, as 'EleutherAI/pythia-70m'"
        )


def _load_run(source: str, folder: Path, device: torch.device | str) -> LoadedModel:
    """Raises ValueError, before it reads a tensor, unless names and shapes of the weights match the config."""
    from safetensors import safe_open

    check_names(folder)
    path = folder / WEIGHTS
    if not path.exists():
        raise ValueError(
            f"{folder} has no {WEIGHTS}: copies of a run may leave it out, and a diverged run has none; "
            "copy it from where it was made, or name another run"
        )
    _check_sums(folder)
    config = stored_config(read_yaml(folder / RUN_CONFIG), str(folder / RUN_CONFIG))
    _check_layers(config.n_layers, len(check_weights(path)))
    with torch.device("meta"):
        expected = {name: [*weight.shape] for name, weight in Decoder(config).named_parameters()}
    with safe_open(path, framework="pt") as file:
        shapes = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
        wrong = min((name for name in {*shapes, *expected} if shapes.get(name) != expected.get(name)), default=None)
        if wrong is not None:
            raise ValueError(
                f"{path} does not hold the model of {RUN_CONFIG}: {wrong} has shape {shapes.get(wrong)} where the "
                f"config says {expected.get(wrong)}; copy both files again"
            )
        weights = {name: file.get_tensor(name) for name in shapes}
    model = Decoder(config)
    model.load_state_dict(weights, strict=False)
    _check_finite(model, folder)
    sizes = {name: getattr(config, name) for name in SIZES}
    facts = Facts(family="sparsedepth", **sizes, max_len=None, params_total=_n_parameters(model), dtype="float32")
    probed = ProbedDecoder(model.to(device).eval())
    return LoadedModel(source=source, folder=folder, weights=[path], probed=probed, facts=facts, config=config)


def _check_sums(folder: Path) -> None:
    """Raises ValueError if a complete run's files do not match the checksums of its marker."""
    if not (folder / MARKER).exists():
        return
    recorded = read_json(folder / MARKER).get("files")
    for name in (RUN_CONFIG, WEIGHTS):
        entry = recorded.get(name) if isinstance(recorded, dict) else None
        if not isinstance(entry, dict) or entry.get("sha256") != sha256(folder / name):
            raise ValueError(
                f"run folder {folder} is damaged: {name} is not the file that was written (its checksum differs); "
                "copy it again from where it was made"
            )


def _check_finite(model: nn.Module, folder: Path) -> None:
    """Raises ValueError for NaN or infinite weights, with which no score exists."""
    for name, weight in model.named_parameters():
        if n_bad := int((~weight.isfinite()).sum()):
            raise ValueError(
                f"{folder} has weights that are not finite: {name} holds NaN or infinity at {n_bad:,} of "
                f"{weight.numel():,} places; export it again"
            )


def _check_layers(n_layers: Any, n_tensors: int) -> None:
    """Raises ValueError for a config with more layers than there are tensors."""
    if not isinstance(n_layers, int) or not 1 <= n_layers <= n_tensors:
        raise ValueError(f"the config says {n_layers!r} layers, and the weights are {n_tensors} tensors; {COMPARE}")


def _load_hf(source: str, folder: Path, device: torch.device | str, dtype: Dtype, memory: float | None) -> LoadedModel:
    """A folder of a Hugging Face model, checked before a tensor is read and tried on one token after."""
    check_transformers(version("transformers"))
    from transformers.utils import logging

    from sparsedepth.probe.hf_adapter import ProbedHfModel

    logging.disable_progress_bar()  # it would mix with our output

    values = check_folder(folder)
    check_installed(values["model_type"])
    config = _hf_config(folder, values)
    paths = weight_files(folder)
    stored = {name: dtype for path in paths for name, dtype in check_weights(path).items()}
    n_bytes = sum(path.stat().st_size for path in paths)
    _check_layers(config.num_hidden_layers, len(stored))
    dtypes = _dtypes(stored, folder)
    if dtype == "fp32" or TYPES[config.model_type].has_tables:
        dtypes = torch.float32, torch.float32
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element")  # an expert may be 0 wide: none
        _check_parameters(config, folder, n_bytes)
        model = _read_model(config, folder, dtypes)
    _check_finite(model, folder)
    for part in (*model.base_model.children(), model.get_output_embeddings()):
        if not isinstance(part, nn.ModuleList) or memory is None or n_bytes <= memory:
            part.to(device)
    probed = ProbedHfModel(model)
    # Settings with which the layers fail, such as more chosen experts than there are.
    with _told(f"{folder / CONFIG} describes a model that cannot be run"), probing(probed):
        deque(stream(probed, torch.zeros(1, 1, dtype=torch.long, device=probed.device)), maxlen=0)
    return LoadedModel(
        source=source,
        folder=folder,
        weights=paths,
        probed=probed,
        facts=_hf_facts(config, _n_parameters(model), probed),
        config=None,
    )


def _hf_facts(config: Any, params_total: int, probed: "ProbedHfModel") -> Facts:
    n_heads = getattr(config, "num_attention_heads", None) or config.num_heads
    told = next((n for name in _KV_HEADS if (n := getattr(config, name, None))), n_heads)
    query, key = map(probed.matrices(1).get, ("query", "key"))
    return Facts(
        family=config.model_type,
        n_layers=probed.n_layers,
        d_model=config.hidden_size,
        n_heads=n_heads,
        n_kv_heads=told if query is None or key is None else n_heads * len(key) // len(query),
        n_experts=next((n for name in EXPERTS if (n := getattr(config, name, None))), 0),
        vocab_size=probed.vocab_size,
        max_len=probed.max_len,
        params_total=params_total,
        dtype=str(next(probed.block_module(1).parameters()).dtype).removeprefix("torch."),
    )


def _n_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def _told(mistake: str) -> Generator[None]:
    """Context whose errors, of many kinds in the library and its parts, become one line."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{mistake} (transformers {version('transformers')}: {_line(error)}); {COMPARE}") from None


def check_transformers(version: str) -> None:
    """Raises ValueError for a release older than OLDEST_TRANSFORMERS."""
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < OLDEST_TRANSFORMERS:
        oldest = ".".join(map(str, OLDEST_TRANSFORMERS))
        raise ValueError(f"transformers {version} is not safe to load models with; install {oldest} or later")


def check_installed(model_type: str) -> None:
    """Raises ValueError for a type that the installed transformers lacks."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        raise ValueError(
            f"model_type={model_type!r} is not in transformers {version('transformers')}, which is installed; "
            "install the latest release of it"
        )


def _hf_config(folder: Path, values: Named) -> Any:
    """The config. The kernels are chosen here. A width that heads of their own size (head_dim) do not divide is no
    mistake, though some types refuse it (transformers#46211): it is set afterwards."""
    from transformers import CONFIG_MAPPING

    fields = {
        name: value
        for name, value in values.items()
        if not IMPLEMENTATION.fullmatch(name) and name != "quantization_config"  # the files' dtypes tell, see `_dtypes`
    }
    if isinstance(pad := fields.get("pad_token_id"), int) and pad >= (fields.get("vocab_size") or math.inf):
        warnings.warn(f"{folder / CONFIG}: pad_token_id={pad} is not below vocab_size, and is left out", stacklevel=2)
        del fields["pad_token_id"]
    sizes = ("hidden_size", "num_attention_heads", "head_dim")
    with _told(f"{folder / CONFIG} is not a config of its model type"):
        width, heads, head_width = (fields.get(name) or 0 for name in sizes)
        is_uneven = heads and head_width and width % heads
        given = {**fields, "hidden_size": heads * head_width} if is_uneven else fields
        made = CONFIG_MAPPING[values["model_type"]]
        config = made.from_dict(made._decode_special_floats(given))
        if is_uneven:
            config.hidden_size = width
        return config


def _dtypes(stored: Mapping[str, str], folder: Path) -> tuple[torch.dtype, torch.dtype]:
    """Of all weights, and of those of the layers: the smallest dtype that rounds none of them. Raises ValueError for
    weights that are no numbers by themselves."""
    weights = {name: dtype for name, dtype in stored.items() if not _BUFFERS.search(name)}
    if unknown := {*weights.values()} - _DTYPES.keys():
        raise ValueError(f"{folder} holds weights of dtype {min(unknown)}: {QUANTISED}")
    of_all = [_DTYPES[dtype] for dtype in weights.values()] or [torch.float32]
    of_layers = [_DTYPES[dtype] for name, dtype in weights.items() if _IN_LAYER.search(name)] or of_all
    return reduce(torch.promote_types, of_all), reduce(torch.promote_types, of_layers)


def _check_parameters(config: Any, folder: Path, n_bytes: int) -> None:
    """Raises ValueError for a config with more weights than the files can hold: none is invented."""
    from transformers import AutoModelForCausalLM

    with _told(f"{folder / CONFIG} describes no model"), torch.device("meta"):
        planned = AutoModelForCausalLM.from_config(config, attn_implementation="eager", trust_remote_code=False)
    if 2 * _n_parameters(planned) > n_bytes:
        raise ValueError(
            f"{folder / CONFIG} describes {_n_parameters(planned):,} parameters, and the weight files have {n_bytes:,} "
            f"bytes: they belong to another model, or parts miss; {COMPARE}"
        )


def _read_model(config: Any, folder: Path, dtypes: tuple[torch.dtype, torch.dtype]) -> Any:
    """The model, read at the first dtype, with its layers held at the second."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoModelForCausalLM

    dtype, of_layers = dtypes
    made: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    has_softcap = hasattr(config, "attn_logit_softcapping")  # which only eager supports
    kernel = "sdpa" if made._supports_sdpa and not has_softcap else "eager"
    with _told(f"{folder} cannot be loaded"):
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            attn_implementation=kernel,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    model, report = loaded
    report["unexpected_keys"] = _without_predictors(report["unexpected_keys"], config, folder)
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(str(name) for name in report[kind] if not _BUFFERS.search(str(name)))
        if names:
            raise ValueError(
                f"the weights of {folder} are not those of its config: {kind.replace('_', ' ')} {names[0]}; {COMPARE}"
            )
    # Every position of every fork passes through embedding, final norm and head.
    for part in (*model.base_model.children(), model.get_output_embeddings()):
        part.to(of_layers if isinstance(part, nn.ModuleList) else torch.float32)
    return model.eval()


def _without_predictors(names: Collection[str], config: Any, folder: Path) -> list[str]:
    """The names of weights without those of layers that predict several tokens ahead (MTP), which stand after the
    last layer and take no part in the prediction of the next one; these are told."""
    n_more = getattr(config, "num_nextn_predict_layers", None) or getattr(config, "mtp_num_hidden_layers", None) or 0
    of_layer = {name: re.search(r"(?:^|\.)layers\.(\d+)\.", name) for name in names}
    ahead = [
        name
        for name, layer in of_layer.items()
        if re.search(r"(^|\.)mtp(\.|_)", name) or (n_more and layer and int(layer[1]) >= config.num_hidden_layers)
    ]
    if ahead:
        told = f"{folder}: {len(ahead)} weights of layers that predict further tokens (MTP) are not measured"
        warnings.warn(told, stacklevel=2)
    return [name for name in names if name not in ahead]


def _download(name: str, revision: str | None, downloads: Path | None) -> Path:
    """The snapshot of a hub model: config first, so that unsupported models are refused before downloading weights."""
    check_transformers(version("transformers"))
    from huggingface_hub import snapshot_download, try_to_load_from_cache

    cache = None if isinstance(try_to_load_from_cache(name, CONFIG, revision=revision), str) else downloads

    def snapshot(*files: str, revision: str | None) -> Path:
        try:
            return Path(snapshot_download(name, revision=revision, allow_patterns=list(files), cache_dir=cache))
        except Exception as error:  # network, permission and cache each raise their own
            at = f" at revision {revision!r}" if revision else ""
            problem = f"model {name!r}{at} is not a local folder and cannot be downloaded from the hub ({_line(error)})"
            closed = type(error).__name__ in ("GatedRepoError", "RepositoryNotFoundError")
            fix = "ask for access on its page, then `hf auth login`" if closed else "check the name and the network"
            raise ValueError(f"{problem}; {fix}, or name a folder") from None

    first = snapshot(CONFIG, revision=revision)
    config = read_json(first / CONFIG)
    check_config(config, name)
    check_installed(config["model_type"])
    return snapshot(*_HUB_FILES, revision=first.name)


def _line(error: BaseException) -> str:
    """The error behind the hub's, in one line: 'ConnectError: Name or service not known'."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
