"""Weight sparsity of matrices with known entries.

Attention sparsity, entropy, sink: uniform and one-hot attention, transformers, a plain loop, blocks of rows.

Activation sparsity: hand-made hidden units, the plain loop, and what tells activations apart.

Expert use: loads worked out by hand, a plain loop over tokens, budgets, dense models.
"""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from reference import FAMILIES, attention_weights, expert_loads, run_config
from support.handmade_models import (
    HandMadeModel,
    brackets,
    found_by,
    identity,
    integers,
    known,
    normal,
    profiles,
    tokens_per_pass,
)
from support.largest_tensor import Largest

from sparsedepth.measure import sparsity as module
from sparsedepth.measure.sparsity import (
    add_activation_rows,
    add_attention_rows,
    add_expert_rows,
    attention_sums,
    effective_experts,
    shares,
    variation,
    weight_counts,
)
from sparsedepth.model.context import Context
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder


def counts_of(*layers, thresholds, relative=False):
    """Of matrices in layers: below each threshold, and all."""
    matrices = [{str(index): matrix for index, matrix in enumerate(layer)} for layer in layers]
    probed = HandMadeModel([identity] * len(layers), normal(2, 2), matrices=matrices)
    return weight_counts(probed, thresholds, relative=relative)[""].tolist()


def test_absolute_count_by_hand():
    one = torch.tensor([[0.5, -0.05], [0.0, 0.1]])  # below 0.1: -0.05 and 0; 0.1 itself is not
    two = torch.tensor([[1.0, 2.0, -0.09, 3.0]])
    assert counts_of([one, two], [two], thresholds=[0.1, 10.0]) == [[3, 8, 8], [1, 4, 4]]


def test_thresholds_are_not_rounded_to_the_dtype_of_the_weights():
    """bf16 has no 0.001: the number next to it is 0.00099945, and a weight of that size is below the threshold."""
    matrix = torch.tensor([[0.00099945, 0.00100327, 1.0, 1.0]], dtype=torch.bfloat16)
    assert counts_of([matrix], thresholds=[1e-3]) == [[1, 4]]
    relative = torch.tensor([[0.1, 0.0, 1.0, 1.0]], dtype=torch.bfloat16)  # rms 0.70889 of 0.10010, 0, 1 and 1
    assert counts_of([relative], thresholds=[0.1412], relative=True) == [[1, 4]]


def test_relative_count_by_hand():
    matrix = torch.tensor([[3.0, 4.0], [0.0, 0.0]])  # rms 5/2
    assert counts_of([matrix], thresholds=[1.0, 1.5, 1.7], relative=True) == [[2, 3, 4, 4]]


def test_relative_share_is_blind_to_a_rescale_of_a_matrix_and_the_absolute_one_is_not():
    wide, narrow = normal(64, 64), normal(64, 64) * 1e-3
    layers = ([wide], [narrow], [wide, narrow])
    relative = [below / n for below, n in counts_of(*layers, thresholds=[0.1], relative=True)]
    assert relative[0] == relative[1] == relative[2]
    assert relative[0] == pytest.approx(math.erf(0.1 / math.sqrt(2)), abs=0.01)  # 0.0797
    absolute = [below / n for below, n in counts_of(*layers, thresholds=[1e-3])]
    assert known(absolute[0]) < 0.01 and absolute[1] == pytest.approx(math.erf(1 / math.sqrt(2)), abs=0.02)


def test_a_matrix_of_zeros_is_sparse_and_has_no_relative_share():
    zeros, ones = torch.zeros(2, 2), torch.ones(3, 1)
    assert counts_of([zeros], [zeros, ones], thresholds=[0.1]) == [[4, 4], [4, 7]]
    assert counts_of([zeros], [zeros, ones], thresholds=[0.1], relative=True) == [[0, 0], [0, 3]]


@pytest.mark.parametrize("family", FAMILIES)
def test_against_a_plain_count_over_the_parameters(family):
    model = Decoder(run_config(**FAMILIES[family]))
    names = [name for name, weight in model.blocks.named_parameters() if weight.ndim > 1 and "router" not in name]
    entries = [abs(w) for name in names for w in model.blocks.get_parameter(name).detach().flatten().tolist()]
    count_C = weight_counts(ProbedDecoder(model), [0.01, 0.3], relative=False)[""].sum(0)
    assert count_C.tolist() == [sum(w < eps for w in entries) for eps in (0.01, 0.3, math.inf)]


def test_kinds_by_hand():
    """The experts of a layer are one kind together; a layer without a kind has no share of it."""
    dense = {"query": torch.tensor([[0.5, 0.01]]), "gate": torch.tensor([[0.01], [0.02]])}
    experts = {"query": torch.tensor([[0.5, 0.7]]), "expert0.up": torch.ones(1, 3), "expert1.up": torch.zeros(1, 1)}
    probed = HandMadeModel([identity] * 2, normal(2, 2), matrices=[dense, experts])
    found = weight_counts(probed, [0.1], relative=False)
    assert {kind: count_LC.tolist() for kind, count_LC in found.items()} == {
        "": [[3, 4], [1, 6]],
        "query": [[1, 2], [0, 2]],
        "gate": [[2, 2], [0, 0]],
        "up": [[0, 0], [1, 4]],
    }
    assert shares(found["gate"]) == [[1.0, None]]
    relative = weight_counts(probed, [0.1], relative=True)
    assert relative["up"].tolist() == [[0, 0], [0, 3]]  # the expert of zeros has no scale


def uniform(layer, x_BTD):
    zeros = torch.zeros(x_BTD.shape[0], 2, x_BTD.shape[1], 4)
    return zeros, zeros[:, :1]


def to_itself(layer, x_BTD):
    """Scores 100 on the diagonal, 0 elsewhere."""
    n_tokens = x_BTD.shape[1]
    eye = torch.eye(n_tokens).expand(x_BTD.shape[0], 1, -1, -1)
    return 100 * n_tokens**0.5 * eye, eye


def to_the_first(layer, x_BTD):
    keys = torch.zeros(x_BTD.shape[0], 1, x_BTD.shape[1], 4)
    keys[:, :, 0] = 100.0
    return torch.ones_like(keys), keys


def attention_sparsity(probed, tokens, taus, relative_taus):
    """By name the values by head, their mean, None where undefined, and the number of weights or rows behind each."""
    rows = found_by(add_attention_rows, probed, tokens, attention_tau=taus, attention_rel_tau=relative_taus)
    found = {}
    for name in dict.fromkeys(row["metric"] for row in rows.heads):
        own = [row for row in rows.heads if row["metric"] == name]
        by_head = np.array([row["value"] for row in own], dtype=float).reshape(probed.n_layers, -1)
        mean = None if np.isnan(by_head.mean()) else by_head.mean()
        found[name] = SimpleNamespace(by_head=by_head, total=SimpleNamespace(value=mean), n=own[0]["n"])
    for name in ("attention_entropy", "attention_entropy_rel", "attention_sink"):
        found[name].total.value = rows.summary[name]
    return found


def test_uniform_attention_has_known_shares_entropies_and_sink():
    """Row i holds i weights 1/i. T = 8: 36 weights; below 0.3 are those of rows 4..8: 4 + 5 + 6 + 7 + 8 = 30.
    H_i = ln i and a_i1 = 1/i: over T = 4 rows ln 24 / 4, and (1/2 + 1/3 + 1/4) / 3. Of one token neither is known."""
    probed = HandMadeModel([identity] * 3, normal(5, 4), queries_keys=uniform)
    found = attention_sparsity(probed, integers(5, 2, 8), [0.3, 0.1], [0.9, 1.1])
    assert found["attention_sparsity@0.3"].total.value == pytest.approx(30 / 36, abs=1e-12)
    assert found["attention_sparsity@0.1"].total.value == 0.0
    assert found["attention_sparsity_rel@0.9"].total.value == 0.0  # no weight is below 0.9 of what it is
    assert found["attention_sparsity_rel@1.1"].total.value == 1.0
    assert found["attention_sparsity@0.3"].by_head.shape == (3, 2)
    assert found["attention_sparsity@0.3"].n == found["attention_sparsity_rel@1.1"].n == 2 * 36
    found = attention_sparsity(probed, integers(5, 2, 4), [0.1], [0.5])
    assert found["attention_entropy"].total.value == pytest.approx(np.log(24) / 4, abs=1e-6)
    assert found["attention_entropy_rel"].total.value == pytest.approx(1.0, abs=1e-6)
    assert found["attention_sink"].total.value == pytest.approx((1 / 2 + 1 / 3 + 1 / 4) / 3, abs=1e-6)
    assert found["attention_sink"].by_head.shape == (3, 2)
    assert (found["attention_entropy"].n, found["attention_entropy_rel"].n, found["attention_sink"].n) == (8, 6, 6)
    single = attention_sparsity(probed, integers(5, 3, 1), [0.1], [0.5])
    assert (single["attention_entropy_rel"].total.value, single["attention_sink"].total.value) == (None, None)
    assert single["attention_entropy"].total.value == 0.0


def test_the_absolute_share_grows_with_length_alone_and_the_relative_one_does_not():
    probed = HandMadeModel([identity], normal(5, 4), queries_keys=uniform)
    short, long = (attention_sparsity(probed, integers(5, 1, n), [0.05], [0.9]) for n in (20, 80))
    assert short["attention_sparsity@0.05"].total.value == 0.0
    assert long["attention_sparsity@0.05"].total.value == pytest.approx(1 - (20 * 21) / (80 * 81), abs=1e-12)
    assert short["attention_sparsity_rel@0.9"].total.value == long["attention_sparsity_rel@0.9"].total.value == 0.0


@pytest.mark.parametrize(("queries_keys", "sink"), [(to_itself, 0.0), (to_the_first, 1.0)])
def test_attention_to_one_token_alone(queries_keys, sink):
    """One weight of each row is 1, the other T (T - 1) / 2 are 0."""
    probed = HandMadeModel([identity], normal(5, 4), queries_keys=queries_keys)
    found = attention_sparsity(probed, integers(5, 1, 9), [1e-3], [0.1])
    for name in ("attention_sparsity@0.001", "attention_sparsity_rel@0.1"):
        assert found[name].total.value == pytest.approx(36 / 45, abs=1e-12)
    for name, expected in (("attention_entropy", 0), ("attention_entropy_rel", 0), ("attention_sink", sink)):
        assert found[name].total.value == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("fields", [{}, {"n_kv_heads": 2, "depth_scale": "lns"}, {"n_kv_heads": 1}])
def test_against_a_plain_loop(fields):
    model = Decoder(run_config(init_std=0.4, **fields))
    tokens = integers(40, 2, 12)
    with tokens_per_pass(12):
        found = attention_sparsity(ProbedDecoder(model), tokens, [0.05, 0.01], [0.5])
    rows = np.arange(1, 13)[:, None]
    visible = np.tril(np.ones((12, 12), dtype=bool))
    for layer in range(1, 6):
        weights = attention_weights(model, tokens, layer)
        for head in range(4):
            share = {tau: (weights[:, head] < tau)[:, visible].mean() for tau in (0.05, 0.01)}
            ours = {tau: found[f"attention_sparsity@{tau:g}"].by_head[layer - 1, head] for tau in share}
            assert ours == pytest.approx(share, abs=1e-9)
            relative = (weights[:, head] < 0.5 / rows)[:, visible].mean()
            assert found["attention_sparsity_rel@0.5"].by_head[layer - 1, head] == pytest.approx(relative, abs=1e-9)
        entropy_BHT = -(weights * np.log(np.where(weights > 0, weights, 1))).sum(-1)
        by_head = {
            "attention_entropy": entropy_BHT.mean((0, 2)),
            "attention_entropy_rel": (entropy_BHT[..., 1:] / np.log(rows[1:, 0])).mean((0, 2)),
            "attention_sink": weights[..., 1:, 0].mean((0, 2)),
        }
        for name, expected in by_head.items():
            np.testing.assert_allclose(found[name].by_head[layer - 1], expected, atol=1e-5)
    assert 0.05 < known(found["attention_sparsity@0.05"].total.value) < 0.95


def test_blocks_of_rows_give_the_same(monkeypatch):
    q_BHTK, k_BGTK = normal(2, 4, 23, 6), normal(2, 2, 23, 6, seed=1)
    whole = attention_sums(q_BHTK, k_BGTK, Context(), taus=[0.05, 0.01], relative_taus=[0.5])
    for rows in (1, 5, 22):
        monkeypatch.setattr(module, "MAX_WEIGHTS", rows * 2 * 4 * 23)
        found = attention_sums(q_BHTK, k_BGTK, Context(), taus=[0.05, 0.01], relative_taus=[0.5])
        shares = [name for name in whole if "@" in name]
        assert len(shares) == 3 and all(torch.equal(found[name], whole[name]) for name in shares)
        torch.testing.assert_close(found, whole, rtol=1e-6, atol=1e-6)
    assert all(whole[name].min() > 0 and whole[name].max() < 23 * 24 // 2 for name in shares)


def test_a_context_of_8192_needs_no_square_of_it():
    q_BHTK, k_BGTK = normal(1, 1, 8192, 2), normal(1, 1, 8192, 2, seed=1)
    with Largest() as seen:
        sums = attention_sums(q_BHTK, k_BGTK, Context(), taus=[1e-4], relative_taus=[])
    assert 8192 < seen.entries <= module.MAX_WEIGHTS < 8192**2 / 8
    assert len(sums) == 4 and all(sum_BH.shape == (1, 1) and (sum_BH > 0).all() for sum_BH in sums.values())


HIDDEN_VF = torch.tensor([[0.0, 0, 3, 4], [0, 0, 0, 0], [1, 1, 1, 1], [0.1, 0, 0, 5]])


def activations(probed, tokens):
    return {name: found.by_layer for name, found in profiles(add_activation_rows, probed, tokens).items()}


class HiddenModel(ProbedDecoder):
    """A decoder whose second layer has the hidden units of a table by token, and whose third has experts."""

    def embed(self, tokens_BT):
        self.tokens_BT = tokens_BT
        return super().embed(tokens_BT)

    def hidden_units(self, layer, x_BTD):
        return HIDDEN_VF[self.tokens_BT] if layer == 2 else None


def test_zeros_small_units_and_their_share_of_energy_by_hand():
    """Zeros 2 + 4 + 0 + 2 of 16. rms^2 = (25 + 4 + 25.01) / 16, a tenth of it 0.184: 0.1 is near 0 too. Units:
    25^2 / (4 (81 + 256)), none, 1, 25.01^2 / (4 (0.0001 + 625))."""
    with tokens_per_pass(2):
        found = activations(HiddenModel(Decoder(run_config(n_layers=3))), torch.tensor([[0, 1], [2, 3]]))
    assert found["activation_zeros"] == [None, pytest.approx(8 / 16), None]
    assert found["activation_sparsity"] == [None, pytest.approx(9 / 16), None]
    units = (625 / (4 * 337) + 1 + 25.01**2 / (4 * 625.0001)) / 3
    assert found["activation_units"] == [None, pytest.approx(units), None]


@pytest.mark.parametrize("activation", ["swiglu", "reglu", "relu", "relu2", "gelu"])
def test_against_a_plain_loop_and_only_relus_make_zeros(activation):
    model, tokens_BT = Decoder(run_config(activation=activation, n_layers=2)), integers(40, 3, 16)
    seen = []
    for block in model.blocks:
        block.ffn.down.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach().flatten(0, 1)))
    model.eval()(tokens_BT)
    expected = list(seen)
    with tokens_per_pass(20):
        found = activations(ProbedDecoder(model), tokens_BT)
    for layer, h_nF in enumerate(expected):
        rms = math.sqrt(sum(value**2 for value in h_nF.flatten().tolist()) / h_nF.numel())
        near = sum(abs(value) < 0.1 * rms for value in h_nF.flatten().tolist()) / h_nF.numel()
        assert found["activation_sparsity"][layer] == pytest.approx(near, abs=2 / h_nF.numel())
        zeros = found["activation_zeros"][layer]
        assert 0.3 < zeros < 0.7 if "re" in activation else zeros == 0
        assert zeros == pytest.approx((h_nF == 0).float().mean().item())


def test_a_mixture_has_none_and_its_dense_layers_have():
    model = Decoder(run_config(n_layers=2, n_experts=4, top_k=2, n_dense_layers=1))
    for by_layer in activations(ProbedDecoder(model), integers(40, 2, 16)).values():
        assert by_layer[0] is not None and by_layer[1] is None


def model_of(*routings):
    probed = HandMadeModel([identity] * len(routings), normal(5, 4))
    probed.routing_of = routings
    return probed


def always(probabilities, *choices):
    """A router that gives every token the same probabilities and choices."""

    def routing(x_BTD):
        shape = x_BTD.shape[:2]
        return torch.tensor(probabilities).expand(*shape, -1), torch.tensor(choices).expand(*shape, -1)

    return routing


def in_turn(x_BTD):
    """Token t goes to expert t mod 4, for certain."""
    choice_BT = (torch.arange(x_BTD.shape[1]) % 4).expand(x_BTD.shape[0], -1)
    return torch.nn.functional.one_hot(choice_BT, 4).float(), choice_BT[..., None]


def expert_use(probed, tokens):
    return profiles(add_expert_rows, probed, tokens)


def test_collapsed_balanced_and_sure_and_unsure_by_hand():
    collapsed = always([0.25, 0.25, 0.25, 0.25], 2)  # unsure, but always the same choice
    halves = always([0.5, 0.5, 0.0, 0.0], 0, 1)
    found = expert_use(model_of(collapsed, in_turn, halves, lambda x: None), integers(5, 3, 8))
    assert found["effective_experts"].by_layer == [pytest.approx(1), pytest.approx(4), pytest.approx(2), None]
    assert found["expert_load_variation"].by_layer == [pytest.approx(3**0.5), pytest.approx(0), pytest.approx(1), None]
    assert found["router_entropy"].by_layer == [pytest.approx(math.log(4)), 0.0, pytest.approx(math.log(2)), None]
    assert found["effective_experts"].score.value == pytest.approx(7 / 3)
    assert found["expert_load_variation"].score.value == pytest.approx((3**0.5 + 1) / 3)
    assert found["router_entropy"].score.value == pytest.approx(math.log(8) / 3)


def test_the_load_of_resamples_is_pooled_before_its_entropy():
    assert effective_experts(np.array([[0.5, 0.5], [1.0, 0.0]])) == pytest.approx([2, 1])
    assert variation(np.array([[0.5, 0.5], [1.0, 0.0]])) == pytest.approx([0, 1])


@pytest.mark.parametrize("fields", [{"top_k": 2}, {"top_k": 1, "depth_scale": "lns", "renormalise_gates": False}])
def test_against_a_plain_loop_under_any_budget(fields):
    model = Decoder(run_config(n_experts=4, d_expert=24, **fields))
    tokens = integers(40, 3, 16)
    for max_tokens in (1, 8192):
        with tokens_per_pass(max_tokens):
            found = expert_use(ProbedDecoder(model), tokens)
        for layer in range(1, 6):
            load, entropy = expert_loads(model, tokens, layer)
            assert found["effective_experts"].by_layer[layer - 1] == pytest.approx(effective_experts(np.array(load)))
            assert found["expert_load_variation"].by_layer[layer - 1] == pytest.approx(variation(np.array(load)))
            assert found["router_entropy"].by_layer[layer - 1] == pytest.approx(entropy, rel=1e-5)
    assert brackets(found["effective_experts"].score) and brackets(found["router_entropy"].score)
