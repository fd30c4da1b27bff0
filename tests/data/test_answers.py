"""Prompts and answers: what is read of a file, which targets count, and rows that hold whole documents."""

import json

import numpy as np
import pytest
import tokenizers

from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.config.task import IGNORED
from sparsedepth.data.ngram_losses import ngram_losses
from sparsedepth.data.pairs import KIND, AnswerSource, Pair, PairTokenizer, pack
from sparsedepth.data.pipeline import prepare, split
from sparsedepth.data.sequences import open_source
from sparsedepth.data.tokenizer import ByteTokenizer, FastTokenizer

PAIRS = [{"prompt": f"{n} + {n}?", "answer": f"{2 * n}"} for n in range(40)]


def config(path, **fields) -> RunConfig:
    small = {"seq_len": 32, "batch_tokens": 128, "train_tokens": 1280, "val_fraction": 0.3, "measure_tokens": 96}
    return build(RunConfig, {**small, "fit_tokens": 96, "val_tokens": 96, "corpus": f"sft:{path}", **fields}, "test")


def written(folder, rows, name="pairs.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def source(tmp_path) -> AnswerSource:
    opened = open_source(config(written(tmp_path, PAIRS)), tmp_path / "data")
    assert isinstance(opened, AnswerSource)
    return opened


def documents(inputs_T, targets_T) -> list[tuple[str, str]]:
    """Prompt and answer of each document of a row, from its tokens alone; the answer is what counts."""
    last = 256 if targets_T[-1] == IGNORED else int(targets_T[-1])
    tokens, counts = [*inputs_T.tolist(), last], [False, *(targets_T != IGNORED)]
    found, prompt, answer = [], [], []
    for token, count in zip(tokens, counts, strict=True):
        if token != 256:
            (answer if count else prompt).append(token)
        elif prompt:
            assert count, "the end of an answer counts, and that of nothing else"
            found.append((bytes(prompt).decode(), bytes(answer).decode()))
            prompt, answer = [], []
        else:
            assert not count
    assert not prompt
    return found


def test_rows_hold_whole_documents_and_only_answers_count(source, tmp_path):
    run = config(tmp_path / "pairs.jsonl")
    seen = []
    for step in range(8):
        batch = source.batch(run, step)
        assert batch.inputs.shape == batch.targets.shape == (4, 32)
        seen += [document for row in zip(batch.inputs, batch.targets, strict=True) for document in documents(*row)]
    held_out = source.held_out(32, 32 * 100)
    apart = [document for row in zip(held_out.inputs, held_out.targets, strict=True) for document in documents(*row)]
    known = {(pair["prompt"], " " + pair["answer"]) for pair in PAIRS}
    assert set(seen) | set(apart) == known and not set(seen) & set(apart) and len(apart) == len(set(apart))
    n_train = len(known) - len(apart)
    assert sorted(seen[:n_train]) == sorted(set(seen)), "every epoch holds every document once"
    assert seen[:n_train] != seen[n_train : 2 * n_train], "and has an order of its own"


def test_a_batch_is_a_function_of_its_step(source, tmp_path):
    run = config(tmp_path / "pairs.jsonl")
    late = source.batch(run, 9)
    for step in (0, 4, 9):
        again = source.batch(run, step)
    assert (again.inputs == late.inputs).all() and (again.targets == late.targets).all()
    fresh = open_source(run, tmp_path / "data").batch(run, 9)
    assert (fresh.inputs == late.inputs).all()
    other = run.model_copy(update={"seed": 5})
    assert (source.batch(other, 9).inputs != late.inputs).any()


def test_held_out_ranges_do_not_overlap(source):
    first, rest = source.held_out(32, 64), source.held_out(32, 10_000, 64)
    whole = source.held_out(32, 10_000)
    assert (np.concatenate([first.inputs, rest.inputs]) == whole.inputs).all()
    with pytest.raises(ValueError, match=r"no row of seq_len=32 is left: .* fill \d+ rows; lower measure_tokens"):
        source.held_out(32, 64, 10_000)


def test_answers_to_one_prompt_are_on_one_side_of_the_split(tmp_path):
    rows = [{"prompt": f"{n}?", "answer": answer} for n in range(30) for answer in ("yes", "no", "maybe")]
    documents = [*split(KIND.texts(config(written(tmp_path, rows))), 0.3, KIND.decides_side)]
    train, held_out = ({json.loads(d.text)[0] for d in documents if d.held_out == side} for side in (False, True))
    assert len(documents) == 90 and train and held_out and not train & held_out
    run = config(tmp_path / "pairs.jsonl")
    corpus = prepare(run, tmp_path / "data")
    assert corpus.manifest.val.documents == 3 * len(held_out)


def test_packing_by_hand():
    # rows of 8 inputs hold 9 tokens with the last target: 4 + 5, then 9, then 2 + 3 + 3
    assert pack(np.array([4, 5, 9, 2, 3, 3, 2]), 8).tolist() == [0, 2, 3, 6, 7]


def test_commonsense170k_is_read_as_it_is_released(tmp_path):
    row = {"instruction": "Is ice cold?", "input": "", "output": "the correct answer is true", "answer": "true"}
    path = tmp_path / "commonsense.json"
    path.write_text(json.dumps([row, {**row, "input": "Ice is frozen water."}]))
    plain, with_input = (Pair(*json.loads(text)) for text in KIND.texts(config(path)))
    assert plain.answer == with_input.answer == "the correct answer is true"
    assert plain.prompt == (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\nIs ice cold?\n\n### Response:\n"
    )
    assert "paired with an input that provides further context. Write" in with_input.prompt
    assert "Is ice cold?\n\n### Input:\nIce is frozen water.\n\n### Response:\n" in with_input.prompt


def test_white_space_before_the_answer_belongs_to_it():
    texts = [json.dumps(["a?", "b"]), json.dumps(["a:\n", "b"])]
    assert PairTokenizer(ByteTokenizer()).encode(texts) == [[*b"a?", 256, *b" b"], [*b"a:", 256, *b"\nb"]]


def test_a_text_that_reads_as_the_end_of_a_document_is_refused():
    """A model of pieces that holds '</s>', as T5's: twice in a text it would shift every pair behind it by one."""
    pieces = [("<unk>", 0.0), ("</s>", 0.0), *((character, -1.0) for character in "ab ")]
    tokenizer = PairTokenizer(FastTokenizer(tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, unk_id=0)), 1))
    assert tokenizer.encode(['["a", "b"]']) == [[2, 1, 4, 3]]
    for pair in ('["a</s>", "b"]', '["a", "b</s>"]'):
        with pytest.raises(
            ValueError, match=r"its end of a document, token 1, in the text of the pair .*; leave the pair"
        ):
            tokenizer.encode([pair])


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, r"pairs.jsonl, line 2, has no field 'answer'; an object holds prompt and answer, or"),
        ({"instruction": "x", "answer": "y"}, r"line 2, has no field 'output'"),
        ({"prompt": "x", "answer": "  "}, r"line 2, has an empty 'answer'; fill it in"),
        ({"prompt": "", "answer": "y"}, r"line 2, has an empty 'prompt'"),
        ({"prompt": "x", "answer": 3}, r"line 2, holds int in 'answer', not text"),
        ({"instruction": "x", "input": 3, "output": "y"}, r"line 2, holds int in 'input'"),
        (["x", "y"], r"line 2, is not a JSON object"),
    ],
)
def test_what_is_refused(tmp_path, row, message):
    path = written(tmp_path, [PAIRS[0], row, PAIRS[1]])
    with pytest.raises(ValueError, match=message):
        open_source(config(path), tmp_path / "data")


def test_a_document_longer_than_a_row_is_refused(tmp_path):
    path = written(tmp_path, [PAIRS[0], {"prompt": "x" * 31, "answer": "yy"}, PAIRS[1]])  # 31, a space, 2, eod
    message = r"1 of 3 documents .* longer than seq_len=32: the longest has 34 tokens \('xx.* set seq_len to 34"
    with pytest.raises(ValueError, match=message):
        open_source(config(path), tmp_path / "data")


def test_a_document_may_fill_a_row_to_its_last_target(tmp_path):
    pair = {"prompt": "x" * 30, "answer": "y"}  # 30, a space, y, eod: 33 tokens, 32 inputs
    source = open_source(config(written(tmp_path, [pair, PAIRS[1]]), batch_tokens=32), tmp_path / "data")
    rows = [source.batch(config(tmp_path / "pairs.jsonl", batch_tokens=32), 0), source.held_out(32, 32)]
    (whole,) = [rows for rows in rows if (rows.inputs[0] == ord("x")).sum() == 30]
    assert whole.targets[0].tolist() == [IGNORED] * 29 + [ord(" "), ord("y"), 256]


def test_other_files_are_no_pairs(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ValueError, match="holds no pairs of prompt and answer"):
        open_source(config(tmp_path / "a.txt"), tmp_path / "data")


def test_fields_that_do_not_belong(tmp_path):
    assert config("p.jsonl").mask_documents and config("p.jsonl").eod == 256
    for fields, message in (
        ({"mask_documents": False}, "packs several pairs into a sequence, and each would attend to others"),
        ({"text_field": "body"}, "is about running text"),
        ({"chunk_len": 64}, "is about running text"),
    ):
        with pytest.raises(ValueError, match=message):
            config("p.jsonl", **fields)


def test_the_tables_count_answers_alone(source, tmp_path):
    """Every answer is a space, digits and an end: a table of pairs knows the space and misses some digits."""
    scores = ngram_losses(source, config(tmp_path / "pairs.jsonl"))
    assert scores["chance_loss"] is None and scores["bigram_loss"] is not None and scores["unigram_loss"] is not None
    assert 0.3 < scores["bigram_loss"] < scores["unigram_loss"] < np.log(257)


def test_a_learned_tokenizer_learns_from_the_pairs_text(tmp_path):
    run = config(written(tmp_path, PAIRS), tokenizer="bpe:270", vocab_size=270, eod=0)
    source = open_source(run, tmp_path / "data")
    assert isinstance(source, AnswerSource)
    texts = source.corpus.tokenizer().decode(source.held_out(32, 32).inputs[0].tolist())
    assert "prompt" not in texts and "[" not in texts and " + " in texts
