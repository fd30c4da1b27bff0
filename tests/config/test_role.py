"""The role of every field: true to what it does to a run's cost; and the groups of fields that follow from roles."""

import pytest
from reference import ZOO

from sparsedepth.config.cost import cost
from sparsedepth.config.role import roles
from sparsedepth.config.run import DataConfig, MeasureConfig, MeasureOnlyConfig, RunConfig
from sparsedepth.config.task import TASKS, TaskConfig
from sparsedepth.effects.chain import INTERVENTIONS
from sparsedepth.plan.estimate import measuring_flops, shape
from sparsedepth.recipe.choose import BUDGET

ROLES = roles(RunConfig)
MOE = {"n_experts": 4, "top_k": 2}
ALL_MEASURES = ["loss", "usefulness", "permutation", "removal", "jacobian"]
OTHER: dict = {name: value for fields in ZOO.values() for name, value in fields.items()}
OTHER |= {
    "n_layers": 14, "d_model": 128, "n_heads": 2, "n_kv_heads": 1, "d_ff": 64, "vocab_size": 300, "seq_len": 128,
    "n_experts": 8, "top_k": 3, "d_expert": 24, "n_shared_experts": 1, "n_dense_layers": 1, "renormalise_gates": False,
    "balance_loss": 0.1, "router_z_loss": 0.1, "norm": "peri", "mix_frac": 0.5, "norm_kind": "group", "norm_groups": 8,
    "norm_eps": 1e-5, "depth_scale": "lns", "residual_gate": "layerscale", "gate_init": 1e-3, "init": "scaled",
    "init_std": 0.01, "tie_embeddings": True, "rope_theta": 500.0, "sliding_window": 16,
    "mask_documents": True, "eod": 7, "qk_norm": True, "qk_norm_over": "all", "allow": ["lns_with_scaled_init"],
    "corpus": "text.txt", "text_field": "body", "tokenizer": "bpe:300", "val_fraction": 0.1, "max_corpus_tokens": 9999,
    "chunk_len": 512, "train_tokens": 81_920, "batch_tokens": 4096, "lr": 1e-2, "warmup_frac": 0.2, "min_lr_frac": 0.0,
    "weight_decay": 0.3, "weight_decay_on": "all", "beta1": 0.8, "beta2": 0.99, "adam_eps": 1e-6, "grad_clip": 0.0,
    "start_weights": "0123456789ab", "start_cell": "0123456789ab",
    "seed": 1, "precision": "bf16", "log_every": 1, "observe_every": 1, "divergence_factor": 3.0, "measures": ["loss"],
    "val_tokens": 4096, "eval_seq_len": 64, "measure_tokens": 4096, "fit_tokens": 4096, "usefulness_threshold": 0.2,
    "needed_threshold": 0.1, "permutation_pairs": 3, "removal_ranges": 3, "jacobian_probes": 2, "weight_eps": [1e-5],
    "weight_rel_eps": [0.2], "attention_tau": [1e-5], "attention_rel_tau": [0.2],
    "task_group": "A5", "tracked": "element", "n_operations": 2, "operation_seed": 3, "task_form": "text", "max_gap": 2,
    "letters": 5, "min_hops": 2, "max_hops": 3,
    "optimizer": "muon", "activation": "relu2", "residual_scalars": True, "scalars_start": "falling",
    "value_residual": True, "attention_dropout": 0.1, "residual_dropout": 0.1, "ffn_dropout": 0.1,
    "parametrisation": "mup", "base_width": 16, "base_depth": 3, "gpas": True, "attention_residuals": 8,
    "n_streams": 2, "stream_mixing": "manifold", "loops": 2, "stream_skips": True, "gated_attention": "channel",
    "window_pattern": "SL",
    "schedule": "wsd", "decay_frac": 0.4, "warmup_tokens": 8192, "lr_of": {"embed": 0.25, "attention": 3.0},
}  # fmt: skip
"""Another value of every field than that of the run below; of a field of the model, that of the zoo will do."""


def pair(field: str, small: dict | None = None, value: object = None) -> tuple[RunConfig, RunConfig]:
    """Two runs that differ in a field, which has an effect in both; of other sizes, and with another value."""
    role = ROLES[field]
    fields: dict = {"train_tokens": 40_960, "observe_every": 2, "measures": ALL_MEASURES, "precision": "fp32"}
    fields |= small or {}
    fields |= MOE if role.needs_experts or field == "n_experts" else {}
    fields |= dict([role.only_with]) if role.only_with else {}
    fields |= {"schedule": "wsd"} if field == "decay_frac" else {}
    fields |= {"parametrisation": "mup"} if field == "base_width" else {}
    fields |= {"n_streams": 2} if field == "stream_mixing" else {}
    fields |= {"sliding_window": 8} if field == "window_pattern" else {}
    if field in TaskConfig.model_fields:
        name = next(name for name, task in TASKS.items() if field in task.fields)
        fields |= {"corpus": f"task:{name}", "vocab_size": 264}
        fields |= {"operation_seed": {"n_operations": 2}, "max_gap": {"task_form": "text"}}.get(field, {})
    return RunConfig(**fields), RunConfig(**fields | {field: OTHER[field] if value is None else value})


def amounts(config: RunConfig) -> tuple:
    """What a run costs as far as it is counted: parameters and FLOPs of a step; steps and measuring."""
    return cost(config), (config.n_steps, measuring_flops(config))


def test_every_field_of_every_section_has_one_role():
    assert set(ROLES) == set(RunConfig.model_fields)
    differing = set(ROLES) - {"task_code"} ^ set(OTHER)  # which a plugin's task has: tests/test_plugins.py
    assert not differing, f"{differing}: OTHER above must have another value of each field of RunConfig, and no more"
    assert set(roles(MeasureOnlyConfig)) == {*MeasureConfig.model_fields, "seq_len"}
    assert all(ROLES[name].kind in ("data", "knob") for name in DataConfig.model_fields)


@pytest.mark.parametrize("field", OTHER)
def test_a_role_says_what_a_field_does_to_the_cost(field):
    before, after = pair(field)
    assert getattr(before, field) != getattr(after, field)
    step, amount = (a != b for a, b in zip(amounts(before), amounts(after), strict=True))
    cost_scope = ROLES[field].cost_scope
    if step:  # the other way round does not hold: a kernel may be slower at equal FLOPs
        assert cost_scope == "step", f"{field} changes {amounts(before)[0]} into {amounts(after)[0]}"
    elif amount:
        assert cost_scope in ("amount", "step")
    assert (shape(before) == shape(after)) == (cost_scope == "nothing")
    if cost_scope == "amount":
        assert amount and shape(before, step_only=True) == shape(after, step_only=True)


def test_groups_of_fields_are_those_that_were_listed_by_hand():
    """As they stood before roles; max_corpus_tokens and tasks joined the budgets: their losses do not compare."""
    budget = {"d_model", "d_ff", "vocab_size", "train_tokens", "corpus", "text_field", "tokenizer", "val_fraction"}
    assert set(BUDGET) == budget | {"max_corpus_tokens", *TaskConfig.model_fields}
    damping = dict.fromkeys(
        ("depth_scale", "residual_gate", "residual_scalars", "gpas", "init", "init_std"), "residual_variance_last"
    )
    assert {name: role.directly_sets for name, role in INTERVENTIONS.items()} == damping
