"""The command line as a user meets it: answers, one-line errors with exit code 2, nothing half-written."""

import io
import os
import subprocess
import sys

import pytest
import yaml
from support.made_up_runs import make_run
from support.tiny_sweep import BASE, ENVIRONMENT, corpus, definition, sparsedepth

from sparsedepth.cli.main import run
from sparsedepth.config.load import build
from sparsedepth.config.run import RunConfig
from sparsedepth.store.run_record import read_run


def error(*arguments: object) -> str:
    """The one line of an error."""
    _, err = sparsedepth(*arguments, code=2)
    assert err.startswith("sparsedepth: error: ") and err.count("\n") == 1, err
    assert "Traceback" not in err
    return err


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Two synthetic runs."""
    folder = tmp_path_factory.mktemp("synthetic")
    for seed, loss in ((0, 2.5), (1, 2.7)):
        make_run(folder, build(RunConfig, {"seed": seed}, "t"), {"outcome": "ok", "val_loss": loss})
    return folder


def test_a_command_starts_without_the_packages_that_only_some_need():
    slow = "{'pydantic', 'duckdb', 'pyarrow', 'pandas', 'numpy', 'torch', 'multiprocessing'}"
    code = f"import sys, sparsedepth.cli.commands; print(sorted({slow} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_version_help_metrics():
    assert sparsedepth("--version")[0].startswith("sparsedepth 0.")
    assert "sweep" in sparsedepth("--help")[0]
    out, _ = sparsedepth("metrics", "usefulness")
    assert "share of blocks whose replacement" in out and "2603.15389" in out
    assert "no quantity is called" in error("metrics", "nonsense")


@pytest.mark.parametrize("group", [(), ("scaling",)])
def test_without_a_command_the_help_is_printed(group):
    out, err = sparsedepth(*group, code=2)
    assert out == sparsedepth(*group, "--help")[0] and not err


def test_help_is_instant():
    """What takes the time is loading modules, of which torch alone has more than a thousand."""
    command = [sys.executable, "-X", "importtime", "-m", "sparsedepth", "--help"]
    loaded = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT).stderr.splitlines()
    assert 100 < len(loaded) < 500


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("recipe", "{results}", "--objective", "steps"), "steps"),
        (("status", "{tmp}/absent"), "not an existing folder"),
        (("status", "{tmp}"), "no complete run"),
        (("sweep", "{tmp}/absent.yaml", "--out", "{tmp}/o"), "absent.yaml"),
        (("query", "{results}", "select 1 as n", "-o", "{tmp}/absent/n.csv"), "absent' does not exist; create it"),
        (("sweep", "{tmp}/absent.yaml", "-o", ""), "-o is empty; name a file or folder"),
        (("train", "{tmp}/absent.yaml", "--out="), "--out is empty"),
        (("pack", "{results}", "--out", " "), "--out is empty"),
        (("best", "{results}", "--again", ""), "--again is empty"),
        (("best", "{results}", "--again", "{tmp}/a.yaml", "--format", "csv"), "leave out -o and --format"),
        (("nonsense",), "nonsense"),
        (("query",), "query DIR SQL"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(results, tmp_path, arguments, words):
    filled = [word.format(results=results, tmp=tmp_path) for word in arguments]
    assert words in error(*filled)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ({"corpus": "/no/such/text.txt"}, "/no/such/text.txt"),
        ({"vocab_size": 100}, "vocab_size=100"),
        ({"batch_tokens": 2**20, "train_tokens": 2**20}, "batch_tokens=1,048,576"),
        ({"measure_tokens": 10**6}, "lower measure_tokens"),
        ({"tokenizer": "bpe:5"}, "bpe:5"),
        ({"eval_seq_len": 500_000, "val_tokens": 500_000}, "500,000"),
    ],
)
def test_a_sweep_that_cannot_run_starts_nothing(tmp_path, base, words):
    out = tmp_path / "results"
    assert words in error("sweep", definition(tmp_path, base=base), "--out", out)
    assert not list(out.glob("runs/*")) and not list(out.glob("work/*/log.txt"))


def test_other_wrong_sweeps(tmp_path):
    path = definition(tmp_path)
    assert "'--workers': Input should be" in error("sweep", path, "--out", tmp_path / "o", "--workers", 0)
    assert "cuda:7" in error("sweep", path, "--out", tmp_path / "o", "--device", "cuda:7")
    bad = tmp_path / "bad.yaml"
    bad.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "objectives": ["removal_score"]}))
    assert "needs 'removal' among the measures" in error("sweep", bad, "--out", tmp_path / "o")
    assert not (tmp_path / "o").exists()
    file = tmp_path / "file"
    file.touch()
    assert "cannot be written" in error("sweep", path, "--out", file)


def test_train_writes_a_run_and_prints_what_was_measured(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({**BASE, "corpus": str(corpus(tmp_path)), "n_layers": 2}))
    out, _ = sparsedepth("train", path, "--out", tmp_path / "results", "--set", "seed=3", "--threads", 1)
    assert "usefulness" in out and "val_loss" in out
    again, _ = sparsedepth("train", path, "--out", tmp_path / "results", "--set", "seed=3", "--threads", 1)
    assert again == out.replace("\n", ", complete before: nothing was trained\n", 1)
    answer, _ = sparsedepth("query", tmp_path / "results", "select seed, outcome from runs", "--format", "csv")
    assert answer.split() == ["seed,outcome", "3,ok"]


def test_train_knows_a_complete_run_by_its_marker(tmp_path, monkeypatch, command):
    """Though its disk's clock is ahead; a damaged record is set aside, and the run repeated."""
    folder = make_run(tmp_path, RunConfig(), {"val_loss": 3.0})
    os.utime(folder, (2**32, 2**32))

    def repeated(*arguments, **options):
        folder.rename(tmp_path / "damaged")
        return read_run(make_run(tmp_path, RunConfig(), {"val_loss": 3.0}))

    for train, was_complete in ((lambda *arguments, **options: read_run(folder), True), (repeated, False)):
        monkeypatch.setattr("sparsedepth.cli.train_sweep.TrainCommand.compute", train)
        out, _ = command("train", "run.yaml", "--out", tmp_path)
        assert ("nothing was trained" in out) == was_complete


def test_output_into_a_closed_pipe_is_no_error(results):
    code = f"{sys.executable} -m sparsedepth.cli.main query {results} --schema | head -1"
    found = subprocess.run(["bash", "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert found.stderr == "" and found.stdout


def test_closed_standard_streams_hide_no_answer(results):
    code = f"{sys.executable} -m sparsedepth.cli.main query {results} 'select 41 + 1 as n' --format csv <&- 2>&-"
    found = subprocess.run(["bash", "-c", code], capture_output=True, text=True, env=ENVIRONMENT)
    assert (found.returncode, found.stdout) == (0, "n\n42\n")


COMMANDS = [
    ["metrics"],
    ["schema"],
    ["query", "RESULTS", "select seed, 'weight² Δ é' as sign, * from runs"],
    ["best", "RESULTS"],
    ["effects", "RESULTS"],
    ["status", "RESULTS"],
    ["measure", "--help"],
]


def printed(arguments: list[str], encoding: str, monkeypatch) -> str:
    """Standard output of the command on a terminal with this encoding."""
    screen = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
        patch.setattr(sys, "stdout", screen)
        run(arguments)
    screen.flush()
    assert ended.value.code == 0
    return screen.buffer.getvalue().decode(encoding)


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_any_terminal_shows_all_rows(results, command, monkeypatch):
    """Signs that an ascii terminal lacks are a question mark; a narrow one takes more lines."""
    arguments = [str(results) if word == "RESULTS" else word for word in command]
    monkeypatch.setenv("COLUMNS", "100")
    whole = printed(arguments, "utf-8", monkeypatch)
    assert whole
    plain = printed(arguments, "ascii", monkeypatch)
    assert plain.count("\n") == whole.count("\n") and len(plain) == len(whole)
    assert all(shown in (sign, "?") for shown, sign in zip(plain, whole, strict=True) if shown not in "+-|")
    monkeypatch.setenv("COLUMNS", "20")
    narrow = printed(arguments, "ascii", monkeypatch)
    assert narrow.count("\n") >= whole.count("\n") and "more rows" not in narrow


def test_a_narrow_terminal_shows_every_row_of_a_wide_table(results, monkeypatch):
    query = "select range as i, repeat('x', 90) as a, repeat('y', 90) as b from range(60)"
    monkeypatch.setenv("COLUMNS", "30")
    out = printed(["query", str(results), query], "ascii", monkeypatch)
    assert [line.split()[1] for line in out.splitlines() if line.startswith("row ")] == [str(i) for i in range(1, 61)]
