"""Every kernel of attention against the readable one, forward and backward, and that one against its definition."""

import math

import pytest
import torch
from support.optional_packages import flash_attn
from torch._subclasses.fake_tensor import FakeTensorMode

from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.model import attention
from sparsedepth.model.attention import offsets, starts
from sparsedepth.model.context import Context

B, H, T, K = 2, 4, 12, 8
DOCUMENTS = torch.tensor([[0] * 5 + [1] * 3 + [0] * 4, [3] * 12])
"""The first sequence holds three documents: a number that comes back begins a new one."""

CASES = pytest.mark.parametrize("n_groups", [4, 2])
WINDOWS = pytest.mark.parametrize("window", [None, 1, 4, T - 1, 50])
PACKED = pytest.mark.parametrize("document_BT", [None, DOCUMENTS], ids=["whole", "packed"])


def inputs(n_groups: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(B, H, T, K), (B, n_groups, T, K), (B, n_groups, T, K)]
    return [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]


def results(kernel: str, n_groups: int, dtype: torch.dtype, window, document_BT) -> list[torch.Tensor]:
    """The output, and the gradients of a weighted sum of it."""
    qkv = inputs(n_groups, dtype)
    out = attention.KERNELS[kernel](*qkv, Context(window=window, document_BT=document_BT))
    assert out.dtype == dtype and out.shape == (B, H, T, K)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad((out.float() * weight).sum(), qkv)]


def by_hand(q, k, v, window, document_BT) -> torch.Tensor:
    """One query at a time, over a list of the keys it sees."""
    out = torch.zeros(B, H, T, K, dtype=q.dtype)
    for b, h, t in ((b, h, t) for b in range(B) for h in range(H) for t in range(T)):
        first = 0 if window is None else max(0, t - window + 1)
        if document_BT is not None:
            same = [s for s in range(t, -1, -1) if (document_BT[b, s : t + 1] == document_BT[b, t]).all()]
            first = max(first, min(same))
        keys, values = (x[b, h // (H // x.shape[1]), first : t + 1] for x in (k, v))
        out[b, h, t] = ((keys @ q[b, h, t]) / math.sqrt(K)).softmax(0) @ values
    return out


def test_value_residual_weighs_own_values_and_those_of_block_1_each_by_its_scalar():
    """c v_2 + d v_1 with c = 2 and d = 10, of values 5 and 3."""
    sizes = {"n_layers": 2, "d_model": 8, "n_heads": 1, "d_ff": 8}
    layer = attention.make_attention(build(ModelConfig, sizes | {"value_residual": True}, "test"), 2)
    with torch.no_grad():
        layer.value_scalar.fill_(2)
        layer.first_value_scalar.fill_(10)
        context = Context(value_BGTK=torch.full((1, 1, 1, 8), 3.0))
        assert layer.mixed_values(torch.full((1, 1, 1, 8), 5.0), context).unique().tolist() == [40.0]


@PACKED
@WINDOWS
@CASES
def test_reference_is_the_definition(n_groups, window, document_BT):
    q, k, v = (x.detach().double() for x in inputs(n_groups))
    expected = by_hand(q, k, v, window, document_BT)
    found = attention.reference(q, k, v, Context(window=window, document_BT=document_BT))
    torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)


@PACKED
@WINDOWS
@CASES
@pytest.mark.parametrize(
    ("kernel", "dtype", "tolerance"),
    [("sdpa", torch.float32, 1e-5), ("sdpa", torch.bfloat16, 2e-2), ("flash", torch.bfloat16, 2e-2)],
)
def test_kernels_equal_the_reference(n_groups, window, document_BT, kernel, dtype, tolerance, monkeypatch):
    """flash-attn's signatures, computed by the reference: layouts, windows, offsets and groups must be right."""
    flash_attn(monkeypatch)
    ours = results(kernel, n_groups, dtype, window, document_BT)
    expected = results("reference", n_groups, dtype, window, document_BT)
    torch.testing.assert_close(ours, expected, atol=tolerance, rtol=tolerance)


def test_flash_computes_in_the_dtype_of_autocast(monkeypatch):
    flash_attn(monkeypatch)
    q, k, v = inputs(2)
    with pytest.raises(AssertionError):
        attention.KERNELS["flash"](q, k, v, Context())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attention.KERNELS["flash"](q, k, v, Context()).dtype == torch.bfloat16


def test_reference_stays_in_fp32_under_autocast():
    q, k, v = (x.detach() for x in inputs(2))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = attention.reference(q, k, v, Context(window=4))
    assert torch.equal(under, attention.reference(q, k, v, Context(window=4)))


def test_causal_attention_builds_no_mask(monkeypatch):
    monkeypatch.setattr(attention, "visible", lambda *_: pytest.fail("a mask was built"))
    for window in (None, T, T + 1):
        attention.sdpa(*inputs(2), Context(window=window))


@PACKED
def test_layers_of_a_pass_share_one_mask_made_while_measuring_or_training(document_BT):
    context = Context(window=5, document_BT=document_BT)
    with torch.inference_mode():
        attention.sdpa(*(x.detach() for x in inputs(2)), context)
    mask = attention.visible(T, context, torch.device("cpu"))
    assert mask is attention.visible(T, context, torch.device("cpu"))
    assert mask is not attention.visible(T, context.repeated(1), torch.device("cpu"))
    qkv = inputs(2)
    attention.sdpa(*qkv, context).sum().backward()
    assert all(x.grad is not None for x in qkv)


def test_starts_and_offsets_of_documents_by_hand():
    document_BT = torch.tensor([[7, 7, 8, 8, 7], [1, 1, 1, 1, 1]])
    assert starts(document_BT).int().tolist() == [[1, 0, 1, 0, 1], [1, 0, 0, 0, 0]]
    assert offsets(document_BT).tolist() == [0, 2, 4, 5, 10]
    assert offsets(document_BT).dtype == torch.int32


@pytest.mark.parametrize(
    ("device", "dtype", "grouped"),
    [("cuda", torch.float32, False), ("cuda", torch.bfloat16, True), ("cpu", torch.float32, True)],
)
def test_groups_are_left_to_the_kernel_where_it_knows_them(monkeypatch, device, dtype, grouped):
    """On CUDA the fp32 kernel for groups would store every score. Tensors without values stand in for a GPU's."""
    asked: list[tuple[bool, int]] = []

    def kernel(q, k, v, mask, dropout_p, is_causal, enable_gqa):
        assert mask is None
        asked.append((enable_gqa, k.shape[1]))
        return q

    monkeypatch.setattr(attention.F, "scaled_dot_product_attention", kernel)
    with FakeTensorMode():
        q, k = (torch.empty(1, heads, 4, 8, dtype=dtype, device=device) for heads in (4, 2))
        attention.sdpa(q, k, k, Context())
    assert asked == [(grouped, 2 if grouped else 4)]


@PACKED
def test_masks_are_made_inside_a_compiled_block(document_BT, recwarn):
    """Remembered masks live outside of graphs: a compiled block makes its own, without a break or a warning."""
    compiled = torch.compile(attention.sdpa, backend="eager", fullgraph=True)
    seen = {"window": 3, "document_BT": document_BT}
    torch.testing.assert_close(compiled(*inputs(2), Context(**seen)), attention.sdpa(*inputs(2), Context(**seen)))
    assert not recwarn.list
