"""Geometry: turns and stretches planted by hand, undefined cases, the plain loop."""

import itertools
import math

import numpy as np
import pytest
import torch
from reference import FAMILIES, angles, branch_updates, cosine, run_config, states
from support.handmade_models import HandMadeModel, brackets, identity, integers, known, normal, rng, tokens_per_pass

from sparsedepth.measure import geometry as module
from sparsedepth.measure.geometry import geometry, last_positions
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
    found = geometry(HandMadeModel([turn(30), turn(60), turn(90)], PLANE), TOKENS, rng())
    degrees = {(0, 1): 30, (0, 2): 90, (0, 3): 180, (1, 2): 60, (1, 3): 150, (2, 3): 90}
    expected = {pair: math.radians(angle) for pair, angle in degrees.items()}
    assert found.angles == pytest.approx(expected, abs=1e-3)
    # near pi the arccos magnifies the rounding of fp32 states: the cosines themselves are exact
    assert {pair: math.cos(known(a)) for pair, a in found.angles.items()} == pytest.approx(
        {pair: math.cos(a) for pair, a in expected.items()}, abs=1e-6
    )
    profiles = found.profiles
    cosines = [math.cos(math.radians(angle)) for angle in (30, 60, 90)]
    assert profiles["state_cosine"].by_layer == pytest.approx(cosines, abs=1e-6)
    assert profiles["block_influence"].by_layer == pytest.approx([1 - c for c in cosines], abs=1e-6)
    assert profiles["block_influence"].score.value == pytest.approx(1 - sum(cosines) / 3, abs=1e-6)
    assert profiles["angular_distance"].by_layer == pytest.approx([math.pi / 6, math.pi / 3, math.pi / 2], abs=1e-6)
    assert profiles["angular_distance"].score.value == pytest.approx(math.pi / 3, abs=1e-6)
    assert found.profiles["angular_distance_middle"].score.value == pytest.approx(math.pi / 3, abs=1e-6)
    assert profiles["angle_to_end"].by_layer == pytest.approx([math.pi, 5 * math.pi / 6, math.pi / 2], abs=1e-3)
    # a turn by d has a chord of 2 sin(d/2), which leaves the state at an angle of 90 + d/2
    halves = np.sin(np.radians([15, 30, 45]))
    assert profiles["update_ratio"].by_layer == pytest.approx(2 * halves, abs=1e-6)
    assert profiles["update_cosine"].by_layer == pytest.approx(-halves, abs=1e-6)
    # chords at 90 + 15, 30 + 90 + 30 and 90 + 90 + 45 degrees
    assert profiles["update_angle"].by_layer == pytest.approx([math.pi / 4, 5 * math.pi / 12], abs=1e-6)
    assert profiles["state_norm"].by_layer == pytest.approx([(3 + 2 + 1 + 1 + 2 + 2) / 6] * 4, abs=1e-6)
    assert (profiles["state_norm"].first, profiles["angle_to_end"].first, profiles["update_angle"].first) == (0, 0, 1)


def test_an_identity_turns_nothing_and_its_update_has_no_direction():
    found = geometry(HandMadeModel([identity] * 3, normal(5, 4)), integers(5, 3, 7), rng())
    for name in ("update_norm", "update_ratio", "block_influence", "angular_distance", "angle_to_end"):
        assert found.profiles[name].by_layer == pytest.approx([0, 0, 0], abs=1e-6)
        assert found.profiles[name].score.value == pytest.approx(0, abs=1e-6)
    assert set(found.angles) == {(a, b) for a in range(4) for b in range(a + 1, 4)}
    assert max(known(angle) for angle in found.angles.values()) < 1e-6
    assert found.profiles["update_cosine"].by_layer == [None] * 3
    assert found.profiles["update_angle"].by_layer == [None] * 2
    assert found.profiles["update_angle"].score.value is None and found.profiles["update_angle"].score.lo is None


def test_tokens_without_a_direction_are_left_out():
    """Token 0 is the origin, token 1 is (1, 0); the block adds (0, 1): no angle for one, 45 degrees for the other."""
    probed = HandMadeModel([lambda x: x + torch.tensor([0.0, 1.0])], torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    found = geometry(probed, torch.tensor([[0, 1, 0], [1, 0, 0]]), rng())
    assert found.angles == pytest.approx({(0, 1): math.pi / 4}, abs=1e-6)
    assert found.angles_last_token == {(0, 1): None}  # both sequences end at the origin
    assert found.profiles["update_ratio"].by_layer == pytest.approx([1.0], abs=1e-6)
    assert found.profiles["state_norm"].by_layer == pytest.approx([1 / 3, (4 + 2 * math.sqrt(2)) / 6], abs=1e-6)
    assert found.profiles["update_angle"].by_layer == []
    assert found.profiles["update_angle"].score.value is None
    assert found.profiles["angular_distance_middle"].score.value is None


def test_a_state_that_is_not_a_number_is_missing_not_left_out():
    probed = HandMadeModel([lambda x: torch.where(x > 2, math.nan, 2 * x)], PLANE)
    found = geometry(probed, TOKENS, rng())
    assert found.angles == {(0, 1): None} and found.profiles["update_norm"].by_layer == [None]


def test_the_last_token_alone():
    """Only tokens at the origin's right turn; the last ones do not."""
    probed = HandMadeModel([lambda x: torch.where(x[..., :1] > 0, turn(90)(x), 2 * x)], PLANE)
    found = geometry(probed, torch.tensor([[0, 0, 2], [0, 1, 1]]), rng())
    assert found.angles_last_token == pytest.approx({(0, 1): 0}, abs=1e-6)
    assert found.profiles["angular_distance_last_token"].score.value == pytest.approx(0, abs=1e-6)
    assert found.angles == pytest.approx({(0, 1): math.pi / 4}, abs=1e-6)


def test_what_fills_a_sequence_is_not_its_last_token():
    """The block turns the first four places alone: place 3 is the end of the last document, 4 and 5 are filled."""
    turns = torch.arange(6)[:, None] < 4
    probed = HandMadeModel([lambda x: torch.where(turns, turn(90)(x), x)], PLANE)
    filled = torch.tensor([[0, 0, 2, 1, 1, 1]])
    assert last_positions(filled, 1) == [3] and last_positions(filled, 0) == last_positions(filled, None) == [5]
    assert last_positions(torch.tensor([[0, 2, 1], [1, 1, 1], [2, 1, 0]]), 1) == [2, 0, 2]
    assert geometry(probed, filled, rng()).angles_last_token == {(0, 1): 0}
    assert geometry(probed, filled, rng(), eod=1).angles_last_token == pytest.approx({(0, 1): math.pi / 2}, abs=1e-6)


def test_branches_by_hand():
    """x lies along the first axis; attention adds as much along the second, the feed-forward part takes it away."""
    across = torch.tensor([[0.0, 1.0], [0.0, 0.0]])
    probed = HandMadeModel([identity], PLANE, branches=lambda layer, x: (x @ across, -(x @ across)))
    profiles = geometry(probed, torch.tensor([[0, 2, 0]]), rng()).profiles
    assert profiles["attention_norm"].by_layer == pytest.approx([7 / 3], abs=1e-6)
    assert profiles["attention_ratio"].by_layer == pytest.approx([1.0], abs=1e-6)
    assert profiles["attention_cosine"].by_layer == pytest.approx([0.0], abs=1e-6)
    assert profiles["ffn_ratio"].by_layer == pytest.approx([1 / math.sqrt(2)], abs=1e-6)
    assert profiles["ffn_cosine"].by_layer == pytest.approx([-1 / math.sqrt(2)], abs=1e-6)
    assert profiles["update_norm"].by_layer == pytest.approx([0.0], abs=1e-6)


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
            found = geometry(ProbedDecoder(model), tokens, rng())
        assert found.angles == pytest.approx(expected, abs=1e-5)
        assert found.angles_last_token == pytest.approx(last, abs=1e-5)
        assert found.profiles["update_ratio"].by_layer == pytest.approx(ratios, rel=1e-5)
        assert found.profiles["ffn_norm"].by_layer[2] == pytest.approx(ffn.norm(dim=-1).mean().item(), rel=1e-5)
        assert found.profiles["ffn_cosine"].by_layer[2] == pytest.approx(ffn_cosine, abs=1e-5)
        assert found.profiles["angular_distance"].score.value == pytest.approx(
            np.mean([expected[layer - 1, layer] for layer in range(1, 6)]), abs=1e-5
        )
        assert all(brackets(profile.score) for profile in found.profiles.values())
