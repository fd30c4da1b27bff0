"""The measures on every Hugging Face type, against plain hooks over transformers; and on Llama against our decoder."""

import functools
import itertools
import math

import numpy as np
import pytest
import torch
from reference import run_config
from support.handmade_models import integers
from support.hf_families import FAMILIES, tiny
from support.hf_parity import carry, reference
from transformers import PreTrainedModel

from sparsedepth.data.sequences import next_tokens
from sparsedepth.measure.measurements import Measurements, entries_of
from sparsedepth.measure.suite import measure_run
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.hf_adapter import ProbedHfModel
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.quantities import PROFILED

TEXT = integers(40, 2000, seed=7)
BUDGET = {"val_tokens": 160, "measure_tokens": 64, "fit_tokens": 160, "eval_seq_len": 8}
CONFIG = run_config(n_layers=4, **BUDGET)
PARITY = run_config(n_layers=4, **BUDGET, measures=("loss", "variance", "causal", "usefulness", "attention"))
WHOLE = ("gemma2", "gpt2", "gpt_neox", "llama", "mixtral", "olmo2", "qwen2_window", "qwen2_moe", "glm4_moe", "cohere")
"""Types that differ in more than names; the other measures read the same states, matrices and branches of all."""


def held_out(seq_len, n_tokens, skip_tokens):
    return next_tokens(TEXT[skip_tokens:].unfold(0, seq_len + 1, seq_len)[: n_tokens // seq_len].numpy().copy())


@functools.cache
def measured(family: str) -> Measurements:
    model, config = tiny(family), CONFIG if family in WHOLE else PARITY
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    found = measure_run(ProbedHfModel(model), config, held_out, 1.5, step=0)
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())
    return found


class Hooks:
    """A model of transformers with the states of its layers, and layers replaced, by nothing but forward hooks."""

    def __init__(self, model: PreTrainedModel):
        self.model = model
        base = model.base_model
        self.layers = list(base.get_submodule("h" if hasattr(base, "h") else "layers"))
        self.states: list[torch.Tensor] = []

    @torch.no_grad()
    def run(self, tokens_BT, replaced=None):
        """Logits; states x_0 .. x_L in `states`, of a pass with some layers' output replaced by f(input)."""
        self.states = []

        def hook(layer, args, named, output):
            x_BTD = args[0] if args else named["hidden_states"]
            index = self.layers.index(layer)
            self.states += [x_BTD.double()] if index == 0 else []
            if index in (replaced or {}):
                output = replaced[index](x_BTD)
            after_BTD = output[0] if isinstance(output, tuple) else output
            self.states.append(after_BTD.double())
            return output

        handles = [layer.register_forward_hook(hook, with_kwargs=True) for layer in self.layers]
        try:
            return self.model(tokens_BT, use_cache=False).logits.double()
        finally:
            for handle in handles:
                handle.remove()

    def loss(self, tokens, replaced=None):
        logits_BTV = self.run(torch.from_numpy(tokens.inputs), replaced)
        return torch.nn.functional.cross_entropy(logits_BTV.flatten(0, 1), torch.from_numpy(tokens.targets).flatten())

    def updates(self, tokens, replaced=None):
        self.run(torch.from_numpy(tokens.inputs), replaced)
        return [after - before for before, after in itertools.pairwise(self.states)]


def causal_score(hooks: Hooks, tokens) -> float:
    plain, effects = hooks.updates(tokens), []
    for skipped in range(3):
        changed = hooks.updates(tokens, {skipped: lambda x: x})
        for later in range(skipped + 1, 4):
            difference = (changed[later] - plain[later]).norm(dim=-1).sum()
            effects.append((difference / plain[later].norm(dim=-1).sum()).item())
    return float(np.mean(effects))


def affine_loss_added(hooks: Hooks, layer: int, fit, tokens) -> float:
    """By one least-squares problem with a column of ones."""
    hooks.run(torch.from_numpy(fit.inputs))
    before_nD, after_nD = (hooks.states[index].flatten(0, 1) for index in (layer - 1, layer))
    design = torch.cat((before_nD, torch.ones(len(before_nD), 1)), dim=1)
    solution = torch.linalg.lstsq(design, after_nD).solution
    affine = hooks.loss(tokens, {layer - 1: lambda x: (x.double() @ solution[:-1] + solution[-1]).float()})
    return (affine - hooks.loss(tokens)).item()


@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_those_of_plain_hooks(family):
    found, hooks = measured(family), Hooks(tiny(family, "eager"))
    scored, fit = held_out(16, 64, 0), held_out(16, 160, 64)
    rows = {(row["metric"], row["layer"]): row["value"] for row in found.layers}
    expected = {"val_loss": hooks.loss(held_out(16, 160, 0)).item(), "causal_score": causal_score(hooks, scored)}
    hooks.run(torch.from_numpy(scored.inputs))
    expected["residual_variance_last"] = hooks.states[-1].var(-1).mean().item()
    with torch.no_grad():
        weights = hooks.model(torch.from_numpy(scored.inputs), output_attentions=True).attentions
    expected["attention_entropy"] = np.mean([torch.special.entr(w.double()).sum(-1).mean().item() for w in weights])
    assert {name: found.summary[name] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert rows["affine_loss_added", 3] == pytest.approx(affine_loss_added(hooks, 3, fit, scored), rel=1e-3, abs=1e-4)


@pytest.mark.parametrize("family", WHOLE)
def test_every_score_of_every_kind_of_layer_is_a_number(family):
    found = measured(family)
    missing = {name for name, value in found.summary.items() if value is None or not math.isfinite(value)}
    of_nothing = {  # no block of a model that is not trained need be better than its map
        f"{score.name}_{column}"
        for score in PROFILED
        for column in ("largest_share", "centre")
        if score.name in found.summary and all(value <= 0 for _, value in entries_of(score, found.layers, found.pairs))
    }
    assert missing == of_nothing
    for rows in (found.layers, found.heads, found.pairs):
        assert rows and all(row["value"] is None or math.isfinite(row["value"]) for row in rows)


@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_the_same_weights_in_both_libraries_give_the_same_scores(family):
    experts = {"n_experts": 4, "top_k": 2, "d_expert": 24} if family == "mixtral" else {}
    config = run_config(**BUDGET, n_kv_heads=2, **experts)
    own = Decoder(config)
    other = carry(own, reference(config, family))
    assert isinstance(other, PreTrainedModel)
    ours, theirs = (
        measure_run(probed, config, held_out, 1.5, step=0) for probed in (ProbedDecoder(own), ProbedHfModel(other))
    )
    assert theirs.summary == pytest.approx(ours.summary, rel=1e-4, abs=1e-5)
    for table in ("layers", "heads", "pairs"):
        for mine, yours in zip(getattr(ours, table), getattr(theirs, table), strict=True):
            assert {**mine, "value": None} == {**yours, "value": None}
            expected = mine["value"]
            assert yours["value"] == (None if expected is None else pytest.approx(expected, rel=1e-4, abs=1e-5))
