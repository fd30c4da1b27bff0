"""A whole branch by hand has the values and derivatives of its formula; `test_fused` holds models to the plain ones."""

import pytest
import torch
from torch.autograd import gradcheck

from sparsedepth.model import branches, products


def draws(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize(("n_groups", "window", "factor"), [(2, None, None), (1, None, 0.5), (1, 2, None)])
def test_the_gradient_of_attention_is_that_of_finite_differences(n_groups, window, factor):
    """Of two query heads; a window of 2 hides what lies before the last token."""
    angle_TK = draws(5, 2).detach().repeat(1, 2)
    rotary = angle_TK.cos(), angle_TK.sin()
    options = {"eps": 1e-3, "window": window, "factor": None if factor is None else torch.tensor(factor)}

    def branch(x_BTD, norm_D, *weights):
        return branches.attention_branch(x_BTD, norm_D, weights, rotary, **options)

    shapes = ((2, 5, 8), (8,), (8, 8), (4 * n_groups, 8), (4 * n_groups, 8), (8, 8))
    assert gradcheck(branch, tuple(draws(*shape, seed=seed) for seed, shape in enumerate(shapes)))


def test_the_gradient_of_swiglu_is_that_of_finite_differences():
    shapes = ((2, 5, 8), (8,), (6, 8), (6, 8), (8, 6))
    given = tuple(draws(*shape, seed=seed) for seed, shape in enumerate(shapes))
    assert gradcheck(lambda x_BTD, norm_D, *weights: branches.swiglu_branch(x_BTD, norm_D, weights, eps=1e-3), given)


def test_one_token_attends_to_itself_by_hand():
    """x = (3, 4) with norm weights 1: n = x / sqrt(12.5), the value is n, the output matrix doubles it."""
    x_BTD, eye = torch.tensor([[[3.0, 4.0]]]), torch.eye(2)
    rotary = torch.ones(1, 2), torch.zeros(1, 2)
    y_BTD = branches.attention_branch(x_BTD, torch.ones(2), (eye, eye, eye, 2 * eye), rotary, eps=0.0)
    torch.testing.assert_close(y_BTD, x_BTD * (1 + 2 / 12.5**0.5))


@pytest.mark.parametrize("kernel", ["blas", "onednn"])
def test_a_product_onto_another_tensor_is_their_sum(kernel):
    if kernel == "onednn" and not torch.backends.mkldnn.is_available():
        pytest.skip("this torch is built without oneDNN")
    x_ND, weight_XD, onto_NX = (draws(*shape).detach().float() for shape in ((2048, 16), (32, 16), (2048, 32)))
    before_NX = onto_NX.clone()
    y_NX = products.project(x_ND, weight_XD, kernel, onto=onto_NX)
    torch.testing.assert_close(y_NX, onto_NX + x_ND @ weight_XD.T, atol=1e-4, rtol=1e-4)
    assert torch.equal(onto_NX, before_NX)
