"""What training did to the weights: planted updates of a known rank and size, and models whose start is not known."""

import pytest
import torch
from reference import run_config
from support.handmade_models import HandMadeModel, identity, known, normal

from sparsedepth.measure.weight_sparsity import weight_sparsity
from sparsedepth.measure.weight_updates import weight_updates
from sparsedepth.model.decoder import Decoder
from sparsedepth.probe.probed_model import ProbedDecoder


def moved(config, change):
    """A decoder whose blocks' matrices have been moved by `change(weight)`."""
    model = Decoder(config, config.seed)
    with torch.no_grad():
        for weight in model.blocks.parameters():
            if weight.ndim > 1:
                weight += change(weight)
    return ProbedDecoder(model)


def test_one_direction_two_directions_and_all():
    """d_model 32: a rank of 1, 2 and 32 is 1/32, 1/16 and 1 of the smaller side."""
    config = run_config(n_layers=2, n_kv_heads=4, seed=3)

    def rows(n):
        return lambda weight: torch.eye(*weight.shape) * (torch.arange(weight.shape[1]) < n)

    for n in (1, 2, 32):
        found = known_updates(moved(config, rows(n)))
        assert found.rank == pytest.approx([n / 32] * 2, rel=1e-6)
    doubled = known_updates(moved(config, lambda weight: weight))
    assert doubled.size == pytest.approx([1, 1], rel=1e-6)
    assert doubled.entries == [4 * 32 * 32 + 3 * 32 * 48] * 2
    spread = known_updates(moved(config, lambda weight: normal(*weight.shape)))
    assert 0.6 < known(spread.rank[0]) < 0.99


def known_updates(probed):
    found = weight_updates(probed)
    assert found is not None
    return found


def test_sparsity_is_blind_to_it():
    """Turning every matrix moves all of it, and leaves as many weights near 0 as there were."""
    config = run_config(n_layers=1)
    still, turned = moved(config, torch.zeros_like), moved(config, lambda weight: weight.flip(0) - weight)
    for probed in (still, turned):
        assert weight_sparsity(probed, [0.1], relative=True).total == weight_sparsity(still, [0.1], relative=True).total
    assert known_updates(still).size == [0.0] and known_updates(still).rank == [None]
    assert known(known_updates(turned).size[0]) == pytest.approx(2**0.5, rel=0.1)


@pytest.mark.parametrize(
    "fields",
    [
        {"n_experts": 4, "top_k": 2, "d_expert": 24},
        {"weight_density": 0.5},
        {"init": "zero_outputs"},
        {"norm": "deepnorm"},
        {"n_streams": 2},
        {"n_streams": 2, "stream_mixing": "manifold"},
    ],
    ids=str,
)
def test_what_seed_and_configuration_give_again(fields):
    config = run_config(seed=5, **fields)
    assert known_updates(ProbedDecoder(Decoder(config, 5))).size == [0.0] * 5
    assert min(map(known, known_updates(ProbedDecoder(Decoder(config, 6))).size)) > 1


def test_without_a_known_start_there_is_none():
    assert weight_updates(HandMadeModel([identity], normal(3, 2))) is None
    assert weight_updates(ProbedDecoder(Decoder(run_config(start_weights="0123456789ab")))) is None
