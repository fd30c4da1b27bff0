"""The tokens that two models are compared on, and a document that fills its sequence, which keeps all of them."""

import pytest
from support.run_folders import loud_run

from sparsedepth.config.load import build
from sparsedepth.config.model import ModelConfig
from sparsedepth.exchange import export as exporting
from sparsedepth.exchange.export import export
from sparsedepth.exchange.parity import random_documents


def test_random_documents_have_no_end():
    config = build(ModelConfig, {"vocab_size": 6, "seq_len": 50, "mask_documents": True, "eod": 5}, "test")
    tokens_NT = random_documents(config, 3)
    assert tokens_NT.shape == (3, 50) and set(tokens_NT.unique().tolist()) == set(range(5))


@pytest.mark.parametrize("answer", ["x" * 28, "x" * 9])
def test_the_document_compared_of_a_tuned_run_is_never_empty(tmp_path, monkeypatch, answer):
    """28 and the prompt fill the 32 inputs, whose end is the last target alone."""
    rows = [f'{{"prompt": "q{n:02}", "answer": "{answer}"}}\n' for n in range(10, 40)]
    (tmp_path / "pairs.jsonl").write_text("".join(rows))
    pairs = {"corpus": f"sft:{tmp_path / 'pairs.jsonl'}", "val_fraction": 0.4, "seq_len": 32}
    run = loud_run(tmp_path, **pairs)
    compared = []
    inner = exporting._difference
    monkeypatch.setattr(
        exporting, "_difference", lambda a, b, tokens: compared.append(tokens.shape[1]) or inner(a, b, tokens)
    )
    export(run, tmp_path / "out")
    assert compared == [32, len(answer) + 4]
