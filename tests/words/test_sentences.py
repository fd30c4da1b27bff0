"""The committed list of sentences: complete, small, and free of what differs between two runs of the tests."""

from support import sentences


def test_every_function_of_words_was_seen():
    texts = sentences.read()
    assert {*texts} == {*sentences.functions()}, "run `make sentences`, and write a test for a function that none calls"
    assert all(texts.values()) and sentences.FILE.stat().st_size < 110_000


def test_a_text_is_kept_without_what_differs_between_tests():
    text = "run 0123456789ab in /tmp/x/a.b:\n   loss  1.25e-3    (-0.5 to 1,000)\n  ------"
    assert sentences.normalised(text) == "run RUN in PATH: / loss  #  (# to #) / --"
    assert len(sentences.normalised("word " * 90)) == sentences.MOST_CHARACTERS


def test_the_list_is_updated_by_function(tmp_path, monkeypatch):
    """One that no test called this time keeps its texts; one that is gone leaves."""
    file = tmp_path / "sentences.txt"
    monkeypatch.setattr(sentences, "functions", lambda: {"a.f": None, "a.g": None})
    for name, seen in (("1", {"a.f": ["one #", "two"], "a.gone": ["x"]}), ("2", {"a.f": ["two"]})):
        (tmp_path / f"{name}.json").write_text(sentences.json.dumps(seen))
    file.write_text(f"{sentences.HEADING}\na.f\n  old\n\na.g\n  kept\n\na.h\n  left\n")
    sentences.write(tmp_path, file)
    assert sentences.read(file) == {"a.f": ["one #", "two"], "a.g": ["kept"]}


def test_what_a_function_gives_is_seen_and_given(monkeypatch):
    monkeypatch.setattr(sentences, "SEEN", sentences.defaultdict(set))
    lines = sentences._recorded("a.lines", lambda: iter(["2 runs", ""]))
    assert [*lines()] == ["2 runs", ""]
    assert sentences._recorded("a.text", lambda n: f"{n} runs")(3) == "3 runs"
    assert {"a.lines": {"# runs"}, "a.text": {"# runs"}} == sentences.SEEN
