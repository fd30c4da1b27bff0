"""Norms against PyTorch's own, and by hand."""

import pytest
import torch

from sparsedepth.model.norms import GroupNorm, LayerNorm, RMSNorm

X_TD = torch.randn(7, 12, generator=torch.Generator().manual_seed(0)) * 3 + 1


@pytest.mark.parametrize(("ours", "theirs"), [(RMSNorm, torch.nn.RMSNorm), (LayerNorm, torch.nn.LayerNorm)])
def test_norms_are_pytorchs(ours, theirs):
    norm, other = ours(12, 1e-3), theirs(12, eps=1e-3)
    for one in (norm, other):
        for weight, start in zip(one.parameters(), (0.5, -1), strict=False):
            weight.data.copy_(torch.linspace(start, 2, 12))
    torch.testing.assert_close(norm(X_TD), other(X_TD), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("n_groups", [1, 3, 6])
def test_group_norm_is_pytorchs_on_single_tokens(n_groups):
    norm, other = GroupNorm(12, n_groups, 1e-3), torch.nn.GroupNorm(n_groups, 12, eps=1e-3)
    for weight in (norm.weight, other.weight):
        weight.data.copy_(torch.linspace(0.5, 2, 12))
    torch.testing.assert_close(norm(X_TD), other(X_TD), atol=1e-5, rtol=1e-5)


def test_half_precision_is_normed_in_fp32():
    """A sum of squares beyond bf16's steps and fp16's range."""
    x = torch.full((4,), 300.0, dtype=torch.float16)
    assert torch.equal(RMSNorm(4, 1e-6)(x), torch.ones(4))
