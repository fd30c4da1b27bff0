from sparsedepth.words.plain_text import wrapped


def test_sentences_go_on_two_columns_further_in():
    assert wrapped(["a b c", "", "  one two three"], 9) == "a b c\n\n  one two\n    three\n"
    assert wrapped(["\none two three", "four"], 9) == "\none two\n  three\nfour\n"
