"""The model that training starts from (`train --from`): a complete run, or a compatible Hugging Face folder.

The starting model fixes the model fields and the tokenizer; the run's own file may repeat or omit them. Free are fields
that do not change what the model computes for one document (`FREE`). The seed defaults to the starting model's, so that
starts of several seeds are replicates.

A transformers model can be used if a decoder has a place for each of its weights (`FAMILIES`). The decoder's logits are
compared with the model's before training. What `export` has folded into the weights of a run (LNS, gates) stays folded
and is trained as weights: a step of AdamW then changes the gains of layer l sqrt(l) times as much as LNS would let it.
Start from the run itself if possible."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsedepth.config import presets
from sparsedepth.config.corpus import TEXT, is_learned, kind_of
from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.config.role import fields_where
from sparsedepth.config.run import RunConfig
from sparsedepth.config.section import Fields
from sparsedepth.data.tokenizer import Tokenizer
from sparsedepth.exchange.architecture import ACTIVATIONS, TOLERANCE, random_documents
from sparsedepth.files import digest, local_path
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.folder import CONFIG
from sparsedepth.probe.hf_types import hf_names
from sparsedepth.probe.load import RUN_CONFIG, LoadedModel, load_model
from sparsedepth.probe.text import check_reads_text, tokenizer_folder, tokenizer_of
from sparsedepth.quantities.quantity import Named, without_none

FREE = ("seq_len", "mask_documents", "eod", "balance_loss", "router_z_loss", "allow")
"""Model fields that a run may set differently from its starting model."""

FAMILIES = ("llama", "mistral", "qwen3", "mixtral", "olmoe", "qwen3_moe")


@dataclass(frozen=True, kw_only=True, eq=False)
class Start:
    loaded: LoadedModel
    fields: Fields
    """fixed fields of the model"""
    tokenizer_name: str | None
    """the field `tokenizer`; None for a run on a task"""
    tokenizer: Tokenizer | None

    @property
    def facts(self) -> Fields:
        """The manifest's entry about the starting model."""
        run = self.loaded.config
        return {
            "model": self.loaded.source,
            "family": self.loaded.facts.family,
            "run_id": None if run is None else run.run_id,
            "weights_hash": self.loaded.weights_hash,
        }

    @property
    def cell(self) -> str:
        """An id shared by replicates of a starting model: how it was trained, apart from seed and measures. Its
        model fields are fields of each run that starts from it."""
        run = self.loaded.config
        if run is None:
            return self.loaded.weights_hash
        excluded = fields_where(RunConfig, lambda role: role.kind in ("measure", "record", "replicate"))
        chosen = run.cell.model_dump(mode="json", exclude_defaults=True, exclude={*excluded, *ModelConfig.model_fields})
        return digest({**chosen, **{name: getattr(run, name) for name in FREE if name not in ("eod", "allow")}})

    @property
    def learned(self) -> Tokenizer | None:
        """The tokenizer, if learned by the starting run: it cannot be loaded by name."""
        return self.tokenizer if self.tokenizer_name and is_learned(self.tokenizer_name) else None

    def values(self, given: Fields) -> Fields:
        """A run's values merged with the starting model's. Raises ValueError for a model field or tokenizer that
        differs from the starting model's, and for sequences longer than its positions."""
        run, source = self.loaded.config, f"--from {self.loaded.source}"
        values = without_none(presets.expand(given))
        kind = kind_of(values.get("corpus"))
        fixed = {**self.fields, "start_weights": self.loaded.weights_hash, "start_cell": self.cell}
        if kind.is_tokenised and self.tokenizer_name is not None:
            fixed["tokenizer"] = self.tokenizer_name
        for name in fixed.keys() & values.keys() - set(FREE):
            if values[name] != fixed[name]:
                raise ValueError(
                    f"{name}={values[name]!r}, and the model of {source} has "
                    f"{name}={fixed[name]!r}; leave {name} out, or start from another model"
                )
        filled: Named = {**fixed, **values}
        if run is not None:
            if kind.is_tokenised:
                check_reads_text(source, run, "start from a run on text, or train on a task")
            if kind is TEXT:
                filled.setdefault("mask_documents", run.mask_documents)
            filled.setdefault("seed", run.seed)
        if self.tokenizer is not None and (kind.packs_documents or filled.get("mask_documents")):
            filled.setdefault("eod", self.tokenizer.eod)
        longest = self.loaded.facts.max_len
        if longest is not None and (seq_len := filled.get("seq_len", 0)) > longest:
            raise ValueError(f"seq_len={seq_len} is longer than the {longest:,} positions of {source}")
        return filled

    @torch.no_grad()
    def load_into(self, model: Decoder) -> None:
        """Load the weights into a decoder of these fields. Raises ValueError for a transformers model that computes
        something else than the decoder."""
        own = self.loaded.probed.model
        weights = dict(own.named_parameters()) if isinstance(own, Decoder) else _renamed(self.loaded, model)
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
        if not isinstance(own, Decoder):
            _check_logits(self.loaded, model)


def open_start(source: str) -> Start:
    """The model in a folder. Raises ValueError, one line, for other folders and unsupported models."""
    folder = local_path(source)
    if not (folder / RUN_CONFIG).exists() and not (folder / CONFIG).exists():
        raise ValueError(
            f"--from {source!r} is neither the folder of a run (with {RUN_CONFIG}) nor of a Hugging Face model (with "
            f"{CONFIG})"
        )
    loaded = load_model(source, dtype="fp32")
    run = loaded.config
    reads_text = run is None or kind_of(run.corpus).is_tokenised
    if run is None:
        fields = _fields(loaded)
    else:
        left_out = ("mask_documents", "eod", "allow")
        fields = {name: getattr(run, name) for name in ModelConfig.model_fields if name not in left_out}
    return Start(
        loaded=loaded,
        fields=without_none(fields),
        tokenizer_name=(tokenizer_folder(folder) if run is None else run.tokenizer) if reads_text else None,
        tokenizer=tokenizer_of(loaded, folder.resolve().parent.parent / "data") if reads_text else None,
    )


def _fields(loaded: LoadedModel) -> Fields:
    """The fields of the decoder equal to a transformers model. Raises ValueError if there is none."""
    facts = loaded.facts
    config = getattr(loaded.probed.model, "config")  # noqa: B009 - of transformers, untyped
    family = facts.family
    rope = getattr(config, "rope_parameters", None) or {}  # GPT-2 has no rotation
    kinds = getattr(config, "layer_types", None) or ()
    has_window = family in ("mistral", "mixtral") or getattr(config, "use_sliding_window", False) is True
    renormalises = getattr(config, "norm_topk_prob", True)
    reasons = (
        (family not in FAMILIES, f"model_type={family!r} is not one of {', '.join(FAMILIES)}"),
        (family in FAMILIES and rope.get("rope_type") != "default", f"its rope_type is {rope.get('rope_type')!r}"),
        (len({*kinds}) > 1, "only some of its layers have a window"),
        (getattr(config, "num_experts_per_tok", 2) == 1 and renormalises, "one gate that is always 1 trains no router"),
        (getattr(config, "clip_qkv", None) is not None, "it clips queries, keys and values"),
        (getattr(config, "decoder_sparse_step", 1) != 1, "only some of its layers have experts"),
    )
    if told := [reason for applies, reason in reasons if applies]:
        raise ValueError(f"--from {loaded.source} cannot be loaded as a sparsedepth decoder: {told[0]}")
    fields = {
        **{name: getattr(facts, name) for name in ("n_layers", "d_model", "n_heads", "n_kv_heads", "vocab_size")},
        "d_ff": config.intermediate_size,
        "activation": {hf: own for own, hf in ACTIVATIONS.items()}.get(config.hidden_act, config.hidden_act),
        "norm_eps": config.rms_norm_eps,
        "rope_theta": float(rope["rope_theta"]),
        "tie_embeddings": config.tie_word_embeddings,
        "sliding_window": config.sliding_window if has_window and "full_attention" not in kinds else None,
        "qk_norm": family in ("qwen3", "qwen3_moe", "olmoe"),
        "qk_norm_over": "all" if family == "olmoe" else "head",
        # initial weights are not drawn, so these have no effect
        **{name: ModelConfig.model_fields[name].default for name in ("init", "init_std")},
    }
    if facts.n_experts:
        fields |= {
            "n_experts": facts.n_experts,
            "top_k": config.num_experts_per_tok,
            "d_expert": getattr(config, "moe_intermediate_size", config.intermediate_size),
            "renormalise_gates": renormalises,
            "n_dense_layers": len(getattr(config, "mlp_only_layers", None) or ()),
        }
    build(ModelConfig, fields, f"--from {loaded.source}")
    return fields


def _renamed(loaded: LoadedModel, model: Decoder) -> dict[str, Tensor]:
    """A transformers model's weights by the decoder's names. Raises ValueError for missing weights, other shapes, and
    weights without a place."""
    own = dict(loaded.probed.model.named_parameters())
    weights = {}
    names = hf_names(dict(model.named_parameters()), loaded.facts.family)
    for name, parameter in model.named_parameters():
        weight = own.pop(names.get(name, name), None)
        if weight is None or weight.shape != parameter.shape:
            shape = "missing" if weight is None else list(weight.shape)
            raise ValueError(f"--from {loaded.source}: {name} is {shape}, expected {list(parameter.shape)}")
        weights[name] = weight
    if own:
        raise ValueError(f"--from {loaded.source} has weights without a place in a sparsedepth decoder: {min(own)}")
    return weights


def _check_logits(loaded: LoadedModel, model: Decoder) -> None:
    """Raises ValueError unless logits of random tokens agree to TOLERANCE, relative to the largest logit or 1."""
    tokens_1T = random_documents(model.config, 1)
    with loaded.probed.exact():
        hf_logits = loaded.probed.model(tokens_1T).logits.float()
    difference = (model.eval()(tokens_1T) - hf_logits).abs().max().item()
    if not difference <= TOLERANCE * max(1.0, hf_logits.abs().max().item()):
        raise ValueError(
            f"--from {loaded.source} computes something else than a decoder of the same fields: "
            f"logits are up to {difference:.1e} apart"
        )
