"""Every command's help ends with an example that its own parser takes; lists of commands cut no summary short."""

import json
import re
import shlex

import pytest
from typer.main import get_command

from sparsedepth.cli import commands
from sparsedepth.cli.commands import app

GROUP = get_command(app)
COMMANDS = {}
for _name, _command in GROUP.commands.items():
    parts = getattr(_command, "commands", None)
    COMMANDS |= {f"{_name} {part}": inner for part, inner in parts.items()} if parts else {_name: _command}


@pytest.mark.parametrize("words", COMMANDS)
def test_the_example_of_a_command_is_parsed_by_it(words):
    arguments = shlex.split(commands.COMMANDS[words][1])
    given = arguments[len(words.split()) :] if arguments[: len(words.split())] == words.split() else arguments[1:]
    with COMMANDS[words].make_context(words, given) as context:
        assert context.params


def test_there_is_no_example_without_a_command():
    assert set(commands.COMMANDS) == set(COMMANDS)


def test_help_shows_the_example_and_whole_summaries(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    for words in COMMANDS:  # in one line, to copy
        assert f"Example: sparsedepth {commands.COMMANDS[words][1]}\n" in command(*words.split(), "--help")[0]
    listed = " ".join(command("--help")[0].split())
    assert not re.search(r"\w\.\.\.", listed)
    assert "Recommend a configuration from results, or verify it on fresh seeds." in listed
    assert "Rank configurations by their mean over seeds, with interval and baseline; for a search, its" in listed


def options(words):
    return {name for parameter in COMMANDS[words].params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_options_of_one_meaning_have_one_name():
    for words in COMMANDS:
        assert ("-o" in options(words)) == ("--out" in options(words)), words
        assert ("--by" in options(words)) == ("--objective" in options(words)), words
        said = " ".join(getattr(parameter, "help", None) or "" for parameter in COMMANDS[words].params)
        assert "-o's suffix" not in said or "-o" in options(words), words
    assert [words for words in COMMANDS if "--limit" in options(words)] == ["evaluate"]
    assert "--timeout" in options("query")


def test_the_shell_completes_commands(command, monkeypatch):
    monkeypatch.setenv("_SPARSEDEPTH_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "sparsedepth sch")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert "schema" in command()[0]
    assert "--show-completion" in {name for parameter in GROUP.params for name in parameter.opts}


def test_the_schema_is_a_table_that_fits_and_json_on_request(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    text, _ = command("schema")
    lines = text.splitlines()
    assert lines[0].split() == ["field", "type", "default", "meaning"] and max(map(len, lines)) <= 100
    (row,) = [line for line in lines if line.startswith("n_layers ")]
    assert row.split()[:3] == ["n_layers", "int", "12"] and "number of decoder blocks" in row
    (row,) = [line for line in lines if line.startswith("norm ")]
    assert "pre" in row and "Literal" not in text and "NoneType" not in text
    for kind in ("run", "sweep"):
        names = json.loads(command("schema", kind, "--json")[0])["properties"]
        table = {line.split()[0] for line in command("schema", kind)[0].splitlines() if line[:1].strip()}
        assert set(names) <= table, kind
