"""Mistakes in configurations: the validator's messages in our words, and hints for unknown keys.

For an unknown key: names of config fields in other trainers, papers and sweep tools, with the conversion where the unit
differs. A hint only names fields of the config at hand."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from sparsedepth.words.plain_text import commas, did_you_mean

PLAIN = {
    "a valid integer, got a number with a fractional part": "a whole number",
    "a valid integer": "a whole number",
    "a valid number": "a number",
    "a valid boolean": "true or false",
    "a valid string": "text",
    "a valid array": "a list",
    "a valid tuple": "a list",
    "a valid dictionary": "keys and values",
    "an object": "keys and values",
    " after validation": "",
}
"""The validator's wording -> ours."""

SYNONYMS = {
    "n_layers": "layers num_layers num_hidden_layers n_layer depth depths n_blocks",
    "attention_residuals": "attn_res attnres n_attn_res_blocks depth_attention",
    "d_model": "hidden hidden_size hidden_dim n_embd embed_dim embedding_dim dim width model_dim",
    "n_heads": "heads num_heads num_attention_heads n_head attention_heads",
    "n_kv_heads": "kv_heads num_kv_heads num_key_value_heads n_kv_head n_query_groups gqa",
    "d_ff": "intermediate_size ffn_dim ff_dim mlp_dim d_mlp ffn_hidden_size mlp_size",
    "vocab_size": "vocab n_vocab vocabulary_size",
    "seq_len": "context context_length context_len ctx_len n_ctx block_size max_length max_seq_len sequence_length "
    "max_position_embeddings",
    "n_experts": "experts num_experts num_local_experts n_routed_experts moe_experts",
    "top_k": "num_experts_per_tok experts_per_token moe_top_k k",
    "d_expert": "moe_intermediate_size expert_dim expert_size",
    "n_shared_experts": "shared_experts num_shared_experts",
    "balance_loss": "aux_loss_coef router_aux_loss_coef load_balancing_loss aux_loss",
    "norm": "norm_position norm_placement norm_style layernorm prenorm postnorm",
    "norm_eps": "rms_norm_eps layer_norm_eps layernorm_epsilon",
    "depth_scale": "lns layernorm_scaling layer_norm_scaling",
    "init_std": "initializer_range init_scale",
    "tie_embeddings": "tie_word_embeddings weight_tying tied_embeddings share_embeddings",
    "n_streams": "hyper_connections hc_mult num_residual_streams expansion_rate residual_streams",
    "loops": "n_loops num_loops recurrence recurrences num_recurrences n_passes weight_sharing",
    "gated_attention": "attention_gate attn_gate output_gate head_gate elementwise_gate",
    "lr_of": "lr_groups param_groups lr_scale lr_multipliers",
    "sliding_window": "window window_size attention_window local_attention",
    "rope_theta": "rope_base rotary_base",
    "corpus": "dataset dataset_name data data_path data_dir text train_data train_file",
    "tokenizer": "tokenizer_name tokeniser",
    "train_tokens": "tokens n_tokens num_tokens max_tokens token_budget steps n_steps max_steps num_steps train_steps "
    "iterations max_iters iters epochs num_train_epochs",
    "batch_tokens": "batch_size batch global_batch_size train_batch_size bs "
    "per_device_train_batch_size tokens_per_batch",
    "lr": "learning_rate max_lr peak_lr max_learning_rate",
    "min_lr_frac": "min_lr lr_min final_lr_fraction min_learning_rate",
    "warmup_frac": "warmup warmup_steps warmup_ratio warmup_iters num_warmup_steps lr_warmup",
    "weight_decay": "wd decay l2 lambda",
    "beta1": "betas adam_beta1 momentum",
    "beta2": "adam_beta2",
    "adam_eps": "eps epsilon adam_epsilon",
    "grad_clip": "clip max_grad_norm gradient_clip gradient_clip_val clip_grad clip_norm",
    "seed": "random_seed rng_seed manual_seed",
    "precision": "dtype mixed_precision amp bf16 fp16 torch_dtype",
    "log_every": "log_interval logging_steps log_steps",
    "val_tokens": "eval_tokens eval_iters eval_steps val_steps",
    "measures": "metrics scores",
    "space": "grid axes parameters params search_space sweep vary hparams",
    "sampler": "method algorithm strategy search search_alg",
    "objectives": "objective metric goal target_metric optimize",
    "n_trials": "trials num_trials max_trials n_iter num_samples run_cap",
    "seeds": "seed replicates repeats n_seeds num_seeds",
    "base": "fixed defaults config common run shared",
    "question": "description title",
    "exclude": "filter skip except",
    "tune": "tuning lr_sweep",
    "tuning_seeds": "tune_seeds seeds_of_tuning",
    "prune": "pruner early_stopping early_terminate",
}

CONVERSIONS = {
    "steps n_steps max_steps num_steps train_steps iterations max_iters iters": "steps x batch_tokens",
    "epochs num_train_epochs": "tokens of all epochs together",
    "batch_size batch global_batch_size train_batch_size bs per_device_train_batch_size": "sequences x seq_len",
    "min_lr": "min_lr / lr",
    "warmup_steps num_warmup_steps warmup_iters": "warm-up steps / all steps",
    "lns": "depth_scale: lns",
    "betas": "and 'beta2'",
}
"""Synonyms -> how to convert the value."""

COMMAND_OPTIONS = {
    "micro_batch micro_batch_size gradient_accumulation_steps": "--runtime micro_batch=N",
    "device": "--device",
    "compile": "--runtime compile=true",
    "threads": "--threads",
    "num_workers workers": "--workers",
    "output_dir out out_dir": "--out",
}
"""Keys -> the command-line option for them."""

CHOICES = {"float32": "fp32", "bfloat16": "bf16", "layernorm_scaling": "lns", "prenorm": "pre", "postnorm": "post"}
"""Names of values elsewhere -> ours, where they are not near."""


def how_to_write(types: set[str], value: Any, message: str = "") -> str:
    """How to write 100k, 100,000 or 4-12, a value alone in place of a list, another name of a choice, and as text a
    word that YAML reads as another value. `message`: names the choices."""
    if types == {"string_type"} and isinstance(value, bool):
        words = "yes, on and true" if value else "no, off and false"
        return f": YAML reads {words} as {value}, so put the word in quotes"
    if types == {"string_type"} and isinstance(value, int | float):
        return ": put the number in quotes"
    text = str(value)
    parts = re.findall(r"[\w.+-]+", re.sub(r"(?<=\d) *(-|\.\.|:|to) *(?=\d)", ",", text))
    if "list_type" in types and not isinstance(value, dict | None):
        return f": write [{commas(parts)}]"
    if isinstance(value, list) and types & {"int_type", "float_type", "bool_type", "string_type", "literal_error"}:
        return ": one value; several go under 'space', or 'tune', of a sweep"
    if types & {"int_type", "float_type"} and isinstance(value, str):
        if found := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kKmMbBgG])", value):
            return f": write {float(found[1]) * {'k': 1e3, 'm': 1e6}.get(found[2].lower(), 1e9):.15g}"
        if re.fullmatch(r"\d{1,3}(,\d{3})+", value):
            return f": write {value.replace(',', '')}"
        several = f": one value; several go under 'space' of a sweep, as [{commas(parts)}], or in --vary"
        return several if len(parts) > 1 else ""
    if types == {"literal_error"}:
        near = did_you_mean(CHOICES.get(text.lower(), text.lower()), re.findall(r"'([^']+)'", message), "")
        return f"; {near}" if near else ""
    return ""


def in_our_words(message: str) -> str:
    """The validator's message in our words."""
    message, n_theirs = re.subn("^(Input|List|Tuple|Dictionary|String) should", "must", message)
    for theirs, ours in PLAIN.items() if n_theirs else ():
        message = message.replace(theirs, ours)
    return message.removeprefix("Value error, ")


def hint(key: str, fields: Collection[str], run_fields: Collection[str] = ()) -> str | None:
    """'did you mean ...?' for an unknown key; None if nothing is near. `run_fields` stand in a definition's base."""
    name = key.lower().replace("-", "_").replace(" ", "_")
    if name == "extends":
        return "only a YAML file has it, at its top level"
    if (field := _field_for(name, fields)) is not None:
        return _question(field, name)
    if (field := _field_for(name, run_fields)) is not None:
        question = "" if field == key else f"{_question(field, name)} "
        return f"{question}it is a field of a run: set it under 'base'"
    if option := _of(name, COMMAND_OPTIONS):
        return f"it is an option of the command: {option}"
    return did_you_mean(name, fields, "") or None


def _field_for(name: str, fields: Collection[str]) -> str | None:
    if name in fields:
        return name
    return next((field for field in fields if name in SYNONYMS.get(field, "").split()), None)


def _of(name: str, table: Mapping[str, str]) -> str | None:
    """The entry of a table whose key has this word."""
    return next((entry for words, entry in table.items() if name in words.split()), None)


def _question(field: str, name: str) -> str:
    conversion = _of(name, CONVERSIONS) if field != name else None
    return f"did you mean {field!r}{f' ({conversion})' if conversion else ''}?"
