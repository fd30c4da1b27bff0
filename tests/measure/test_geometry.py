"""Geometry: turns and stretches planted by hand, undefined cases, the plain loop.

Trajectories: turns planted token by token, the published ideals, documents, undefined cases, the plain loop.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from reference import FAMILIES, angles, branch_updates, cosine, run_config, states
from support.handmade_models import (
    HandMadeModel,
    brackets,
    by_layer,
    by_pair,
    found_by,
    identity,
    integers,
    known,
    normal,
    score,
    tokens_per_pass,
)

from sparsedepth import quantities
from sparsedepth.data.sequences import next_tokens
from sparsedepth.measure import geometry as module
from sparsedepth.measure.geometry import add_geometry_rows, add_trajectory_rows, ideals, last_positions
from sparsedepth.measure.suite import measure_run
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder

PLANE = torch.tensor([[3.0, 0.0], [0.0, 2.0], [-1.0, 0.0]])
TOKENS = torch.tensor([[0, 1, 2], [2, 1, 1]])


def turn(degrees, stretch=1.0):
    c, s = math.cos(math.radians(degrees)), math.sin(math.radians(degrees))
    matrix = torch.tensor([[c, s], [-s, c]]) * stretch
    return lambda x: x @ matrix


def test_turns_of_the_plane():
    """30, 60 and 90 degrees one after the other: angles add up, 1 - cos is the block influence, norms stay."""
    found = found_by(add_geometry_rows, HandMadeModel([turn(30), turn(60), turn(90)], PLANE), TOKENS)
    degrees = {(0, 1): 30, (0, 2): 90, (0, 3): 180, (1, 2): 60, (1, 3): 150, (2, 3): 90}
    expected = {pair: math.radians(angle) for pair, angle in degrees.items()}
    assert by_pair(found, "angular_distance") == pytest.approx(expected, abs=1e-3)
    # near pi the arccos magnifies the rounding of fp32 states: the cosines themselves are exact
    assert {pair: math.cos(known(a)) for pair, a in by_pair(found, "angular_distance").items()} == pytest.approx(
        {pair: math.cos(a) for pair, a in expected.items()}, abs=1e-6
    )
    cosines = [math.cos(math.radians(angle)) for angle in (30, 60, 90)]
    assert by_layer(found, "state_cosine") == pytest.approx(cosines, abs=1e-6)
    assert by_layer(found, "block_influence") == pytest.approx([1 - c for c in cosines], abs=1e-6)
    assert found.summary["block_influence"] == pytest.approx(1 - sum(cosines) / 3, abs=1e-6)
    assert by_layer(found, "angular_distance") == pytest.approx([math.pi / 6, math.pi / 3, math.pi / 2], abs=1e-6)
    assert found.summary["angular_distance"] == pytest.approx(math.pi / 3, abs=1e-6)
    assert found.summary["angular_distance_middle"] == pytest.approx(math.pi / 3, abs=1e-6)
    assert by_layer(found, "angle_to_end") == pytest.approx([math.pi, 5 * math.pi / 6, math.pi / 2], abs=1e-3)
    # a turn by d has a chord of 2 sin(d/2), which leaves the state at an angle of 90 + d/2
    halves = np.sin(np.radians([15, 30, 45]))
    assert by_layer(found, "update_ratio") == pytest.approx(2 * halves, abs=1e-6)
    assert by_layer(found, "update_cosine") == pytest.approx(-halves, abs=1e-6)
    # chords at 90 + 15, 30 + 90 + 30 and 90 + 90 + 45 degrees
    assert by_layer(found, "update_angle") == pytest.approx([math.pi / 4, 5 * math.pi / 12], abs=1e-6)
    assert by_layer(found, "state_norm") == pytest.approx([(3 + 2 + 1 + 1 + 2 + 2) / 6] * 4, abs=1e-6)
    first = {row["metric"]: row["layer"] for row in reversed(found.layers)}
    assert (first["state_norm"], first["angle_to_end"], first["update_angle"]) == (0, 0, 1)


def test_an_identity_turns_nothing_and_its_update_has_no_direction():
    found = found_by(add_geometry_rows, HandMadeModel([identity] * 3, normal(5, 4)), integers(5, 3, 7))
    for name in ("update_norm", "update_ratio", "block_influence", "angular_distance", "angle_to_end"):
        assert by_layer(found, name) == pytest.approx([0, 0, 0], abs=1e-6)
        if name != "update_norm":  # which is by layer alone
            assert found.summary[name] == pytest.approx(0, abs=1e-6)
    assert set(by_pair(found, "angular_distance")) == {(a, b) for a in range(4) for b in range(a + 1, 4)}
    assert max(known(angle) for angle in by_pair(found, "angular_distance").values()) < 1e-6
    assert by_layer(found, "update_cosine") == [None] * 3
    assert by_layer(found, "update_angle") == [None] * 2
    assert found.summary["update_angle"] is None and found.summary["update_angle_lo"] is None


def test_tokens_without_a_direction_are_left_out():
    """Token 0 is the origin, token 1 is (1, 0); the block adds (0, 1): no angle for one, 45 degrees for the other."""
    probed = HandMadeModel([lambda x: x + torch.tensor([0.0, 1.0])], torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    found = found_by(add_geometry_rows, probed, torch.tensor([[0, 1, 0], [1, 0, 0]]))
    assert by_pair(found, "angular_distance") == pytest.approx({(0, 1): math.pi / 4}, abs=1e-6)
    assert by_pair(found, "angular_distance_last_token") == {(0, 1): None}  # both sequences end at the origin
    assert by_layer(found, "update_ratio") == pytest.approx([1.0], abs=1e-6)
    assert by_layer(found, "state_norm") == pytest.approx([1 / 3, (4 + 2 * math.sqrt(2)) / 6], abs=1e-6)
    assert by_layer(found, "update_angle") == []
    assert found.summary["update_angle"] is None
    assert found.summary["angular_distance_middle"] is None


def test_a_state_that_is_not_a_number_is_missing_not_left_out():
    probed = HandMadeModel([lambda x: torch.where(x > 2, math.nan, 2 * x)], PLANE)
    found = found_by(add_geometry_rows, probed, TOKENS)
    assert by_pair(found, "angular_distance") == {(0, 1): None} and by_layer(found, "update_norm") == [None]


def test_the_last_token_alone():
    """Only tokens at the origin's right turn; the last ones do not."""
    probed = HandMadeModel([lambda x: torch.where(x[..., :1] > 0, turn(90)(x), 2 * x)], PLANE)
    found = found_by(add_geometry_rows, probed, torch.tensor([[0, 0, 2], [0, 1, 1]]))
    assert by_pair(found, "angular_distance_last_token") == pytest.approx({(0, 1): 0}, abs=1e-6)
    assert found.summary["angular_distance_last_token"] == pytest.approx(0, abs=1e-6)
    assert by_pair(found, "angular_distance") == pytest.approx({(0, 1): math.pi / 4}, abs=1e-6)


def test_what_fills_a_sequence_is_not_its_last_token():
    """The block turns the first four places alone: place 3 is the end of the last document, 4 and 5 are filled."""
    turns = torch.arange(6)[:, None] < 4
    probed = HandMadeModel([lambda x: torch.where(turns, turn(90)(x), x)], PLANE)
    filled = torch.tensor([[0, 0, 2, 1, 1, 1]])
    assert last_positions(filled, 1) == [3] and last_positions(filled, 0) == last_positions(filled, None) == [5]
    assert last_positions(torch.tensor([[0, 2, 1], [1, 1, 1], [2, 1, 0]]), 1) == [2, 0, 2]
    whole, cut = (found_by(add_geometry_rows, probed, filled, eod=eod) for eod in (None, 1))
    assert by_pair(whole, "angular_distance_last_token") == {(0, 1): 0}
    assert by_pair(cut, "angular_distance_last_token") == pytest.approx({(0, 1): math.pi / 2}, abs=1e-6)


def test_branches_by_hand():
    """x lies along the first axis; attention adds as much along the second, the feed-forward part takes it away."""
    across = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    probed = HandMadeModel([identity], PLANE, branches=lambda layer, x: (x @ across, -(x @ across)))
    found = found_by(add_geometry_rows, probed, torch.tensor([[0, 2, 0]]))
    assert by_layer(found, "attention_norm") == pytest.approx([7 / 3], abs=1e-6)
    assert by_layer(found, "attention_ratio") == pytest.approx([1.0], abs=1e-6)
    assert by_layer(found, "attention_cosine") == pytest.approx([0.0], abs=1e-6)
    assert by_layer(found, "ffn_ratio") == pytest.approx([1 / math.sqrt(2)], abs=1e-6)
    assert by_layer(found, "ffn_cosine") == pytest.approx([-1 / math.sqrt(2)], abs=1e-6)
    assert by_layer(found, "update_norm") == pytest.approx([0.0], abs=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_against_the_plain_loop_under_any_budget(family, monkeypatch):
    model, tokens = Decoder(run_config(**FAMILIES[family])), integers(40, 3, 16)
    expected, last = angles(model, tokens, range(16)), angles(model, tokens, [15])
    recorded = states(model, tokens)
    ratios = [((b - a).norm(dim=-1) / a.norm(dim=-1)).mean().item() for a, b in itertools.pairwise(recorded)]
    attention, ffn = branch_updates(model, tokens, 3)
    before_ffn = recorded[2] + attention
    ffn_cosine = np.mean([cosine(ffn[b, t], before_ffn[b, t]) for b in range(3) for t in range(16)])
    for max_tokens, max_cosines in ((70, 100), (8192, 2**21)):
        monkeypatch.setattr(module, "MAX_COSINES", max_cosines)
        with tokens_per_pass(max_tokens):
            found = found_by(add_geometry_rows, ProbedDecoder(model), tokens)
        assert by_pair(found, "angular_distance") == pytest.approx(expected, abs=1e-5)
        assert by_pair(found, "angular_distance_last_token") == pytest.approx(last, abs=1e-5)
        assert by_layer(found, "update_ratio") == pytest.approx(ratios, rel=1e-5)
        assert by_layer(found, "ffn_norm")[2] == pytest.approx(ffn.norm(dim=-1).mean().item(), rel=1e-5)
        assert by_layer(found, "ffn_cosine")[2] == pytest.approx(ffn_cosine, abs=1e-5)
        assert found.summary["angular_distance"] == pytest.approx(
            np.mean([expected[layer - 1, layer] for layer in range(1, 6)]), abs=1e-5
        )
        scores = [name for name in found.summary if not name.endswith(("_lo", "_hi"))]
        assert len(scores) > 5 and all(brackets(score(found, name)) for name in scores)


EVEN, EARLY, LATE = 0, 1, 2
"""Tokens of the planted model; each lives in a plane of its own."""
N_LAYERS = 24
TURNS = np.full((3, N_LAYERS), 0.45)
TURNS[:, [0, -1]] = math.pi / 2
TURNS[EARLY, 7:-1] = 0
TURNS[LATE, 1:17] = 0


def planted(turns: np.ndarray = TURNS) -> HandMadeModel:
    """Block l turns token k by turns[k, l - 1] in its plane."""

    def block(angle_K: np.ndarray):
        parts = [torch.tensor([[math.cos(a), math.sin(a)], [-math.sin(a), math.cos(a)]]) for a in angle_K]
        return lambda x: x @ torch.block_diag(*parts)

    embedding_VD = torch.zeros(len(turns), 2 * len(turns))
    for token in range(len(turns)):
        embedding_VD[token, 2 * token] = 1.0 + token  # lengths do not matter
    return HandMadeModel([block(angle_K) for angle_K in turns.T], embedding_VD)


def measured(tokens, probed=None, eod=None):
    return found_by(add_trajectory_rows, probed or planted(), torch.as_tensor(tokens), eod=eod)


def components(found):
    return np.array([by_layer(found, "trajectory_pc1"), by_layer(found, "trajectory_pc2")])


def variances(found):
    return found.summary["trajectory_pc1_share"], found.summary["trajectory_pc2_share"]


def shares(found):
    return found.summary["even_share"], found.summary["early_stop_share"]


def test_the_ideals_of_24_layers_are_the_published_ones():
    right = math.pi / 2
    early, even = ideals(24, 0.45)
    assert early.tolist() == [right, *[0.45] * 6, *[0.0] * 16, right]
    assert even.tolist() == [right, *[0.45] * 22, right]
    assert [int((ideals(n, 1.0)[0][1:-1] > 0).sum()) for n in (4, 6, 12, 48)] == [1, 1, 3, 13]


def test_planted_turns_are_found_and_named():
    found = measured([[EVEN, EVEN, EARLY, LATE], [EVEN, EVEN, EVEN, EARLY]])
    mean_L = (5 * TURNS[EVEN] + 2 * TURNS[EARLY] + TURNS[LATE]) / 8
    np.testing.assert_allclose(by_layer(found, "trajectory_mean"), mean_L, atol=1e-6)
    names = {EVEN: "even", EARLY: "early stop", LATE: "neither"}
    assert [point["nearest"] for point in found.tokens] == [names[point["token_id"]] for point in found.tokens]
    assert shares(found) == (5 / 8, 2 / 8) and found.layers[0]["n"] == 8 and brackets(score(found, "even_share"))
    between = math.acos(math.sqrt(6 / 22))
    to_ideals = {EVEN: (between, 0), EARLY: (0, between), LATE: (math.pi / 2, between)}  # LATE: at the other end
    for point in found.tokens:
        assert (point["to_early_stop"], point["to_even"]) == pytest.approx(to_ideals[point["token_id"]], abs=1e-5)
    middle = np.mean(by_layer(found, "trajectory_mean")[1:-1])
    assert by_layer(found, "even_ideal")[1] == by_layer(found, "early_stop_ideal")[1] == pytest.approx(middle)


def test_the_class_is_of_the_shape_whatever_the_size():
    for size in (0.01, 0.3, 1.5):
        found = measured([[EVEN, EARLY]], planted(TURNS * size))
        assert [point["nearest"] for point in found.tokens] == ["even", "early stop"]


def test_the_components_of_two_kinds_of_tokens():
    """One direction holds all variance: what the two kinds differ in, 0.45 in 16 layers."""
    found = measured([[EVEN, EARLY], [EVEN, EARLY]])
    across = (TURNS[EVEN] - TURNS[EARLY]) / (0.45 * 4)
    np.testing.assert_allclose(components(found)[0], across, atol=1e-6)
    assert variances(found) == pytest.approx((1, 0), abs=1e-6)
    assert [point["pc1"] for point in found.tokens] == pytest.approx([0.9, -0.9, 0.9, -0.9], abs=1e-6)
    np.testing.assert_allclose(components(found) @ components(found).T, np.eye(2), atol=1e-9)


def test_equal_tokens_have_no_component():
    found = measured([[EVEN, EVEN, EVEN]])
    assert variances(found) == (None, None) and found.tokens[0]["pc1"] is None and shares(found) == (1.0, 0.0)


def test_documents_end_where_they_are_known_to():
    """The end itself predicts another document and does not count; a document that began earlier has no position."""
    found = measured([[EVEN, LATE, EVEN, EARLY, LATE, EVEN]], eod=LATE)
    assert found.layers[0]["n"] == 4
    places = [(point["position"], point["document_position"]) for point in found.tokens]
    assert places == [(0, None), (2, 0), (3, 1), (5, 0)]
    unknown = measured([[EVEN, LATE, EVEN, EARLY, LATE, EVEN]])
    assert unknown.layers[0]["n"] == 6 and {point["document_position"] for point in unknown.tokens} == {None}


def test_a_token_without_a_direction_is_left_out():
    probed = planted()
    probed.embedding_VD[LATE] = 0
    found = measured([[EVEN, LATE, EARLY]], probed)
    assert (found.layers[0]["n"], found.summary["even_share"]) == (2, 0.5)


def test_what_has_no_trajectory():
    assert shares(measured([[0, 1, 2]], HandMadeModel([identity] * 4, normal(5, 4)))) == (0.0, 0.0)
    shallow = HandMadeModel([identity] * 3, normal(5, 4))
    at_the_origin = HandMadeModel([identity] * 4, torch.zeros(5, 4))
    broken = HandMadeModel([lambda x: torch.where(x > 0, math.nan, x)] * 4, normal(5, 4))
    for probed in (shallow, at_the_origin, broken):
        nothing = measured(integers(5, 1, 3), probed)
        assert not (nothing.summary or nothing.layers or nothing.tokens)


def test_the_points_are_a_sample_of_all_tokens(monkeypatch):
    tokens = integers(3, 4, 50)
    monkeypatch.setattr(module, "MAX_POINTS", 30)
    found, again = measured(tokens), measured(tokens)
    assert found.tokens == again.tokens
    places = [(point["sequence"], point["position"]) for point in found.tokens]
    assert len(set(places)) == 30 and places == sorted(places) and len({n for n, _ in places}) == 4
    assert all(point["token_id"] == tokens[place] for place, point in zip(places, found.tokens, strict=True))
    assert found.layers[0]["n"] == 200


def test_the_rows_have_the_glossarys_columns():
    config = run_config(measures=["trajectories"], measure_tokens=64)
    text = integers(40, 4, 17).numpy()
    found = measure_run(ProbedDecoder(Decoder(config)), config, lambda *_: next_tokens(text), step=9, eod=3)
    assert {tuple(row) for row in found.tokens} == {tuple(quantity.name for quantity in quantities.TOKENS)}
    assert {row["step"] for row in found.tokens} == {9} and 3 not in {row["token_id"] for row in found.tokens}
    assert {row["metric"]: row["n"] for row in found.layers}["trajectory_mean"] == len(found.tokens)
    shallow = run_config(measures=["trajectories"], n_layers=3)
    nothing = measure_run(ProbedDecoder(Decoder(shallow)), shallow, lambda *_: next_tokens(text), step=9)
    assert not (nothing.summary or nothing.layers or nothing.tokens)


@pytest.mark.parametrize("family", FAMILIES)
def test_trajectories_against_the_plain_loop_under_any_budget(family):
    model, tokens = Decoder(run_config(**FAMILIES[family])), integers(40, 3, 16)
    recorded = states(model, tokens)
    states_VLD = torch.stack(recorded, dim=2).flatten(0, 1)
    angles_VL = np.array([[math.acos(cosine(*two)) for two in itertools.pairwise(x_LD)] for x_LD in states_VLD])
    centred_VL = angles_VL - angles_VL.mean(0)
    spread = np.linalg.svd(centred_VL, compute_uv=False) ** 2
    for max_tokens in (70, 8192):
        with tokens_per_pass(max_tokens):
            found = measured(tokens, ProbedDecoder(model))
        np.testing.assert_allclose(by_layer(found, "trajectory_mean"), angles_VL.mean(0), atol=1e-5)
        assert variances(found) == pytest.approx(tuple(spread[:2] / spread.sum()), abs=1e-4)
        pc_V2 = np.array([[point["pc1"], point["pc2"]] for point in found.tokens])
        np.testing.assert_allclose(pc_V2, centred_VL @ components(found).T, atol=1e-4)
