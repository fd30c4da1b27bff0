from pathlib import Path

from sparsedepth.words.plain_text import cause_of, database_line, error_text, in_shell, without_password, wrapped


def test_sentences_go_on_two_columns_further_in():
    assert wrapped(["a b c", "", "  one two three"], 9) == "a b c\n\n  one two\n    three\n"
    assert wrapped(["\none two three", "four"], 9) == "\none two\n  three\nfour\n"


def test_errors_of_others_are_one_line_without_passwords_and_drawings():
    assert without_password("mysql://me:secret@host/db?password=x&a=1") == "mysql://host/db?password=...&a=1"
    assert cause_of(ValueError("no\n  sqlite://a:b@c")) == "no sqlite://c" and cause_of(KeyError()) == "KeyError"
    drawn = RuntimeError('Parser Error: at "x"\x07\n\nLINE 1: x\n        ^')
    assert database_line(drawn) == 'Parser Error: at "x"?'


def test_an_error_is_shown_in_one_line_by_its_words_where_they_are_meant_to_be_read():
    assert error_text(ValueError("lr is\n negative")) == "lr is negative"
    assert error_text(ValueError()) == "ValueError: "
    assert error_text(KeyError("a")) == "KeyError: 'a'"
    assert len(error_text(OSError("x" * 999))) < 320


def test_a_path_in_a_command_is_quoted_and_no_option():
    assert in_shell(Path("a b"), "-x", "it's") == """'a b' ./-x 'it'"'"'s'"""
