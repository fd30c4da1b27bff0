"""The weights of attention that measures read, held against what the model itself makes of its values."""

import pytest
import torch
from torch import Tensor

from sparsedepth.model import attention
from sparsedepth.model.attention import attention_rows
from sparsedepth.probe.probed_model import ProbedDecoder


def assert_weights_are_used(monkeypatch: pytest.MonkeyPatch, probed: ProbedDecoder, tokens_BT: Tensor) -> None:
    """Times the values that the kernel was given, they are what it returned, whatever a module does before or in it;
    also for copies, as forks are."""
    calls, kernel = [], attention.KERNELS["sdpa"]

    def noted(q_BHTK, k_BGTK, v_BGTK, *others):
        calls.append((v_BGTK, kernel(q_BHTK, k_BGTK, v_BGTK, *others)))
        return calls[-1][1]

    monkeypatch.setitem(attention.KERNELS, "sdpa", noted)
    x_BTD = probed.embed(tokens_BT)
    for layer in range(1, probed.n_layers + 1):
        for copies in (1, 2):
            calls.clear()
            probed.block(layer, x_BTD.repeat(copies, 1, 1))
            ((v_BGTK, out_BHTK),) = calls
            q_BHTK, k_BGTK, context = probed.attention_inputs(layer, x_BTD.repeat(copies, 1, 1))
            rows_BHTT = attention_rows(q_BHTK, k_BGTK, 0, tokens_BT.shape[1], context)
            expected_BHTK = rows_BHTT @ v_BGTK.repeat_interleave(q_BHTK.shape[1] // k_BGTK.shape[1], dim=1)
            torch.testing.assert_close(out_BHTK, expected_BHTK, atol=1e-5, rtol=1e-5)
        x_BTD = probed.block(layer, x_BTD)
