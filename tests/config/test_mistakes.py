"""What is wrong with a file is said in the file's words, all of it at once, and the field's words point to ours."""

import pytest

from sparsedepth.config.load import build, parse_yaml, read_extended
from sparsedepth.config.run import RunConfig
from sparsedepth.config.runtime import RuntimeConfig
from sparsedepth.config.sweep import SweepDefinition
from sparsedepth.words.mistakes import CONVERSIONS, SYNONYMS, hint

ASKED = {"name": "a", "question": "Is it?", "hypothesis": "Yes."}


def told(model, values):
    with pytest.raises(ValueError) as caught:
        build(model, values, "x")
    message = str(caught.value)
    inner = ("function-after", "list[", "union", "Interval", "[key]", "literal", "validation", "Input should")
    assert not [word for word in inner if word in message], message
    return message


@pytest.mark.parametrize(
    ("word", "model", "field"),
    [
        ("steps", RunConfig, "'train_tokens' (steps x batch_tokens)"),
        ("batch_size", RunConfig, "'batch_tokens' (sequences x seq_len)"),
        ("num_hidden_layers", RunConfig, "'n_layers'"),
        ("learning-rate", RunConfig, "'lr'"),
        ("hidden_size", RunConfig, "'d_model'"),
        ("grid", SweepDefinition, "'space'"),
    ],
)
def test_words_of_the_field_point_to_ours(word, model, field):
    assert hint(word, model.model_fields) == f"did you mean {field}?"


def test_a_word_that_is_near_no_field_gets_no_suggestion():
    """'foo' shares two of its letters with 'top_k'."""
    assert hint("foo", RunConfig.model_fields) is None
    assert hint("n_layer_", RunConfig.model_fields) == "did you mean 'n_layers'?"
    assert "unknown key 'foo' (value 1); `sparsedepth schema` lists" in told(RunConfig, {"foo": 1})


def test_the_words_are_no_fields_themselves_and_lead_to_fields():
    models = (RunConfig, SweepDefinition)
    for field, words in SYNONYMS.items():
        owners = [model for model in models if field in model.model_fields]
        assert owners, field
        assert not [word for word in words.split() for model in owners if word in model.model_fields], field
    assert set(" ".join(CONVERSIONS).split()) <= set(" ".join(SYNONYMS.values()).split())
    assert "micro_batch" in RuntimeConfig.model_fields
    assert hint("micro_batch", ()) == "it is an option of the command: --runtime micro_batch=N"


def test_a_field_of_a_run_beside_the_base_is_sent_there():
    message = told(SweepDefinition, {**ASKED, "lr": 1e-3, "steps": 100})
    assert "unknown key 'lr' (value 0.001); it is a field of a run: set it under 'base'" in message
    assert "did you mean 'train_tokens' (steps x batch_tokens)? it is a field of a run" in message


def test_values_of_the_wrong_kind_are_told_in_plain_words():
    message = told(SweepDefinition, {**ASKED, "space": {"lr": "x", "n_layers": [[1]], "beta1": {"low": 0.5}}})
    assert "space.lr='x' must be a list or keys and values" in message
    assert "space.n_layers.0=[1] must be true or false, a whole number, a number or text" in message
    assert "space.beta1.high is missing" in message and message.count("space.beta1") == 1
    message = told(RunConfig, {"n_layers": "12", "tie_embeddings": "yes", "weight_eps": [1.0, "x"], "measures": []})
    assert "n_layers='12' must be a whole number (number of decoder blocks)" in message
    assert "tie_embeddings='yes' must be true or false" in message and "weight_eps.1='x' must be a number" in message
    assert "measures=[] must have at least 1 item, not 0" in message


def test_text_that_yaml_reads_as_another_value_belongs_in_quotes():
    message = told(SweepDefinition, {**ASKED, "hypothesis": False, "question": True, "cost": 3})
    words = "YAML reads no, off and false as False, so put the word in quotes (the answer"
    assert f"hypothesis=False must be text: {words}" in message
    assert "question=True must be text: YAML reads yes, on and true as True" in message
    assert "cost=3 must be text: put the number in quotes (what it costs" in message
    assert "objectives.0=False must be text: YAML reads no" in told(SweepDefinition, {**ASKED, "objectives": [False]})
    assert "corpus=1.5 must be text: put the number in quotes" in told(RunConfig, {"corpus": 1.5})
    assert "quotes" not in told(RunConfig, {"corpus": [1], "n_heads": True, "norm": False})


def test_all_mistakes_of_a_file_are_told_at_once():
    message = told(RunConfig, {"steps": 2, "norm": "odd", "n_heads": 3, "n_experts": 4, "batch_tokens": 300})
    parts = ("'steps'", "norm='odd'", "n_heads=3 does not divide", "n_experts=4 needs top_k", "batch_tokens=300")
    assert not [part for part in parts if part not in message], message
    content = {**ASKED, "sampler": "bayes", "base": {"layers": 2, "lr": "x"}, "space": {"heads": [2], "top_k": [0]}}
    message = told(SweepDefinition, content)
    parts = ("sampler='bayes'", "base: unknown key 'layers'", "base: lr='x'", "space: unknown key 'heads'", "top_k=0")
    assert not [part for part in parts if part not in message], message


def test_what_follows_from_a_mistake_is_not_told_as_another():
    """Without its misspelt width the model would have the default one, which 3 heads do not divide."""
    assert "n_heads" not in told(RunConfig, {"hidden_size": 96, "n_heads": 3})
    assert "no meaning" not in told(SweepDefinition, {**ASKED, "sampler": "bayes", "n_trials": 9})


@pytest.mark.parametrize(("written", "number"), [("1.0e+15", 10**15), ("1e6", 10**6), ("2000.0", 2000)])
def test_a_whole_number_may_have_an_exponent(written, number):
    steps = {"train_tokens": parse_yaml(written, "x"), "batch_tokens": 1000, "seq_len": 100}
    config = build(RunConfig, steps, "x")
    assert (config.train_tokens, type(config.train_tokens)) == (number, int)
    assert config.run_id == build(RunConfig, {**steps, "train_tokens": number}, "x").run_id
    assert "train_tokens=0.5 must be a whole number" in told(RunConfig, {**steps, "train_tokens": 0.5})


@pytest.mark.parametrize(("written", "digits"), [("100k", "100000"), ("2.5M", "2500000"), ("1B", "1000000000")])
def test_a_number_with_a_letter_is_told_in_digits(written, digits):
    message = told(RunConfig, {"train_tokens": written})
    assert f"train_tokens={written!r} must be a whole number: write {digits} (" in message


def test_seeds_may_be_a_number():
    counted = build(SweepDefinition, {**ASKED, "seeds": 3, "scales": {"micro": {"seeds": 2}}}, "x")
    assert counted.seeds == [0, 1, 2] and counted.scaled("micro").seeds == [0, 1]
    assert counted == build(SweepDefinition, {**ASKED, "seeds": [0, 1, 2], "scales": {"micro": {"seeds": [0, 1]}}}, "x")
    assert "seeds=0 must be 1 or more" in told(SweepDefinition, {**ASKED, "seeds": 0})
    for wrong in (True, "three"):
        message = told(SweepDefinition, {**ASKED, "seeds": wrong})
        assert f"seeds={wrong!r} must be a whole number, or a list of whole numbers" in message
    several = "one value; several go under 'space' of a sweep, as [12, 24], or in --vary ("
    assert several in told(RunConfig, {"n_layers": "12 to 24"})
    many = "n_layers=[12, 24] must be a whole number: one value; several go under 'space', or 'tune', of a sweep ("
    assert many in told(RunConfig, {"n_layers": [12, 24]})
    assert told(RunConfig, {"n_heads": True}) == "x: n_heads=True must be a whole number (query heads)"


def test_a_file_extends_another(tmp_path):
    (tmp_path / "below").mkdir()
    (tmp_path / "common.yaml").write_text("base: {lr: 1e-3, d_model: 64}\nseeds: 3\n")
    (tmp_path / "below" / "mine.yaml").write_text("extends: ../common.yaml\nbase: {lr: 2e-3}\nname: mine\n")
    merged = read_extended(tmp_path / "below" / "mine.yaml")
    assert merged == {"base": {"lr": 2e-3, "d_model": 64}, "seeds": 3, "name": "mine"}


@pytest.mark.parametrize(
    ("named", "words"),
    [
        ("mine.yaml", "a cycle"),
        ("other.yaml", "a cycle"),
        ("/etc/passwd", "relative to this one"),
        ("[a, b]", "relative to this one"),
        ("''", "relative to this one"),
        ("gone.yaml", "does not exist"),
        ("big.yaml", "1,000,000"),
        ("long0.yaml", "a chain of more than 8 files"),
    ],
)
def test_extends_is_strict(tmp_path, named, words):
    (tmp_path / "mine.yaml").write_text(f"extends: {named}\n")
    (tmp_path / "other.yaml").write_text("extends: mine.yaml\n")
    (tmp_path / "big.yaml").write_text("a: " + "x" * 1_000_000)
    for i in range(9):
        (tmp_path / f"long{i}.yaml").write_text(f"extends: long{i + 1}.yaml\n")
    with pytest.raises(ValueError, match=words):
        read_extended(tmp_path / "mine.yaml")
