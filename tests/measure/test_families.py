"""The whole suite on every Hugging Face family, and on Llama against our own decoder with the same weights."""

import math

import pytest
import torch
from reference import run_config
from support.handmade_models import integers
from support.hf_families import FAMILIES, tiny
from support.hf_parity import carry, reference
from transformers import PreTrainedModel

from sparsedepth.data.sequences import next_tokens
from sparsedepth.measure.suite import measure_run
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.hf_adapter import ProbedHfModel
from sparsedepth.probe.probed_model import ProbedDecoder
from sparsedepth.quantities import PROFILED
from sparsedepth.quantities.depth_profile import entries_of

TEXT = integers(40, 2000, seed=7)
BUDGET = {"val_tokens": 160, "measure_tokens": 64, "fit_tokens": 160, "eval_seq_len": 8}
CONFIG = run_config(n_layers=4, **BUDGET)


def held_out(seq_len, n_tokens, skip_tokens):
    return next_tokens(TEXT[skip_tokens:].unfold(0, seq_len + 1, seq_len)[: n_tokens // seq_len].numpy().copy())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_score_of_every_family_is_a_number(family):
    model = tiny(family)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    found = measure_run(ProbedHfModel(model), CONFIG, held_out, 1.5, step=0)
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
    assert all(torch.equal(before[name], weight) for name, weight in model.state_dict().items())


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
            assert yours["value"] == (
                None if mine["value"] is None else pytest.approx(mine["value"], rel=1e-4, abs=1e-5)
            )
