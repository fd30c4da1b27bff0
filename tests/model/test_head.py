"""The head: one for training and measuring; its cross-entropy in pieces has the plain one's value and gradients."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from support.largest_tensor import Largest

from sparsedepth.config.model import ModelConfig
from sparsedepth.config.task import IGNORED
from sparsedepth.model import head
from sparsedepth.model.decoder import Decoder
from sparsedepth.model.head import cross_entropy, loss_and_change

N, D, V = 40, 6, 50


def drawn(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draws = torch.Generator().manual_seed(0)
    x_ND = torch.randn(N, D, generator=draws).to(dtype).requires_grad_()
    weight_VD = torch.randn(V, D, generator=draws).to(dtype).requires_grad_()
    return x_ND, weight_VD, torch.randint(V, (N,), generator=draws)


def plainly(x_ND, weight_VD, target_N):
    return F.cross_entropy(F.linear(x_ND, weight_VD).float(), target_N)


@pytest.mark.parametrize("rows", [1, 7, N, 2 * N])
def test_value_and_gradients_are_the_plain_ones(rows):
    x_ND, weight_VD, target_N = drawn()
    loss, loss_N = cross_entropy(x_ND, weight_VD, target_N, budget=4 * V * rows)
    gradients = torch.autograd.grad(3 * loss, (x_ND, weight_VD))
    plain = plainly(x_ND, weight_VD, target_N)
    expected = torch.autograd.grad(3 * plain, (x_ND, weight_VD))
    torch.testing.assert_close(loss, plain, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(gradients, expected, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(loss_N.mean(), plain, atol=1e-6, rtol=1e-6)
    with torch.no_grad():
        loss, _ = cross_entropy(x_ND, weight_VD, target_N, 4 * V * rows)
        torch.testing.assert_close(loss, plain, atol=1e-6, rtol=1e-6)


def test_under_autocast_products_are_bf16_and_the_rest_fp32():
    x_ND, weight_VD, target_N = drawn()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (loss, _), plain = cross_entropy(x_ND, weight_VD, target_N, 4 * V * 7), plainly(x_ND, weight_VD, target_N)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain, atol=1e-6, rtol=1e-6)
    found, expected = (torch.autograd.grad(value, (x_ND, weight_VD)) for value in (loss, plain))
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=2e-2)
    assert all(gradient.dtype == torch.float32 for gradient in found)


def test_sums_in_fp32_are_nearer_to_fp64_and_are_one_product_for_each_part(monkeypatch):
    """On CUDA, whose `addmm` takes an `out_dtype`; here a stand-in, which does what it does. Eight parts."""
    x_ND, weight_VD, target_N = drawn()
    factors = [(torch.randn(V, 5).bfloat16(), torch.randn(5, D).bfloat16()) for _ in range(8)]
    exact_VD = sum(left.double() @ right.double() for left, right in factors)
    own, calls = torch.addmm, []

    def wide(given, left, right, *, out_dtype, out=None):
        calls.append(left.shape)
        return own(given, left.float(), right.float(), out=out)

    errors = []
    for is_wide in (False, True):
        if is_wide:
            monkeypatch.setattr(torch, "addmm", wide)
        head.can_add_to_fp32.cache_clear()
        sum_VD = torch.zeros(V, D)
        for left, right in factors:
            head._add_product(sum_VD, left, right)
        errors.append((sum_VD - exact_VD).norm() / exact_VD.norm())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            cross_entropy(x_ND, weight_VD, target_N, 4 * V * 5)
    head.can_add_to_fp32.cache_clear()
    assert errors[1] < 1e-6 and 5e-4 < errors[0] < 1e-2
    assert calls == [(16, 16), *[(V, 5)] * 16]


def test_the_logits_have_their_share_of_a_card_and_whole_tiles(monkeypatch):
    """Of 256 GB 1, of 8 GB the least; 300 rows are one tile of 256 and a rest, 200 stay 200."""
    card = SimpleNamespace(total_memory=256e9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)
    assert head.logits_bytes.__wrapped__(torch.device("cuda")) == 1e9
    card.total_memory = 8e9
    assert head.logits_bytes.__wrapped__(torch.device("cuda")) == head.logits_bytes(torch.device("cpu")) == 2**28
    x_ND, weight_VD, target_N = (part.repeat(10, 1) if part.ndim == 2 else part.repeat(10) for part in drawn())
    for rows, largest in ((300, 256), (200, 200)):
        with Largest() as seen:
            cross_entropy(x_ND, weight_VD[:V], target_N, budget=4 * V * rows)
        assert seen.entries == largest * V


@pytest.mark.parametrize(("rows", "largest"), [(8, 8 * V), (1, V * D)])
def test_no_tensor_outgrows_the_budget(rows, largest):
    """But for the head's gradient, which is as large as the head."""
    x_ND, weight_VD, target_N = drawn()
    with Largest() as seen:
        cross_entropy(x_ND, weight_VD, target_N, budget=4 * V * rows)[0].backward()
    assert seen.entries == largest < N * V
    with Largest() as plain:
        plainly(x_ND, weight_VD, target_N).backward()
    assert plain.entries == N * V


@pytest.mark.parametrize(
    ("rows", "is_compiled"), [(7, False), (N, False), pytest.param(7, True, marks=pytest.mark.slow)]
)
def test_a_target_of_minus_100_does_not_count(rows, is_compiled):
    x_ND, weight_VD, target_N = drawn()
    target_N[::3] = IGNORED
    chunk = torch.compile(loss_and_change, dynamic=False) if is_compiled else loss_and_change
    loss, loss_N = cross_entropy(x_ND, weight_VD, target_N, budget=4 * V * rows, chunk=chunk)
    plain, plain_N = (F.cross_entropy(F.linear(x_ND, weight_VD), target_N, reduction=how) for how in ("mean", "none"))
    torch.testing.assert_close((loss, loss_N), (plain, plain_N), atol=1e-6, rtol=1e-6)
    gradients, expected = (torch.autograd.grad(value, (x_ND, weight_VD)) for value in (loss, plain))
    torch.testing.assert_close(gradients, expected, atol=1e-6, rtol=1e-6)
    loss, loss_N = cross_entropy(x_ND, weight_VD, torch.full_like(target_N, IGNORED))
    assert loss == 0 and not loss_N.any() and not torch.autograd.grad(loss, x_ND)[0].any()


def test_a_wider_head_divides_its_input_for_training_and_measuring():
    """mup at twice base_width: logits are halves of the plain ones, and loss and gradients are those of the halves."""
    fields = {"n_layers": 1, "d_model": 16, "n_heads": 2, "vocab_size": V, "init_std": 0.5}
    model = Decoder(ModelConfig(**fields, parametrisation="mup", base_width=8))
    draws = torch.Generator().manual_seed(0)
    x_BTD, target_BT = torch.randn(2, 9, 16, generator=draws), torch.randint(V, (2, 9), generator=draws)
    half_BTV = F.linear(model.norm(x_BTD), model.head.weight) / 2
    torch.testing.assert_close(model.logits(x_BTD), half_BTV)
    loss, loss_BT = model.cross_entropy(x_BTD, target_BT)
    plain_BT = F.cross_entropy(half_BTV.transpose(1, 2), target_BT, reduction="none")
    torch.testing.assert_close(loss_BT, plain_BT.detach(), atol=1e-6, rtol=1e-6)
    weights = (model.head.weight, model.norm.weight)
    gradients, expected = (torch.autograd.grad(value, weights) for value in (loss, plain_BT.mean()))
    torch.testing.assert_close(gradients, expected, atol=1e-6, rtol=1e-6)
