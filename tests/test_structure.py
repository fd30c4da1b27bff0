"""The shape of the library: imports point one way, rows never see torch, and nothing is unpickled or evaluated."""

import ast
import functools
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sparsedepth"
ROOT = PACKAGE.parent

LEVELS = [
    {"plugins"},
    {"quantities"},
    {"words"},
    {"files", "once"},
    {"outside"},
    {"config"},
    {"model", "data", "store"},
    {"train", "probe", "plan", "effects"},
    {"scaling"},
    {"measure", "recipe", "plots", "exchange"},
    {"run"},
    {"sweep", "watch"},
    {"report", "cluster", "trackers"},
    {"cli"},
    {"__main__"},
]
"""Lowest first: a part may import parts of lower levels, and itself."""

TENSORS = {"model", "data", "train", "probe", "measure", "exchange", "watch"}
ROWS = ("config", "plan", "store", "effects", "scaling", "recipe", "plots", "report", "trackers")
MAY_NOT = {part: TENSORS for part in ROWS}

HEAVY = {"torch", "transformers", "datasets"}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@functools.cache
def nodes_of(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source)))


def for_the_checker(tree: ast.AST) -> set[ast.AST]:
    """What stands under `if TYPE_CHECKING`, and never runs."""
    blocks = [node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {inner for block in blocks for inner in ast.walk(block)}


@functools.cache
def imports(path: Path) -> set[str]:
    """Every module that a file imports, at its top or in a function. Words may name the types of all records, which
    they get from above, for the checker alone."""
    found: set[str] = set()
    nodes = nodes_of(path.read_text())
    unseen = for_the_checker(nodes[0]) if part_of(path) == "words" else set()
    for node in nodes:
        if node in unseen:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def parts_imported(path: Path) -> set[str]:
    return {
        name.split(".")[1]
        for name in imports(path)
        if name.startswith("sparsedepth.") and not name.endswith("__version__")
    }


def level(part: str) -> int:
    return next(i for i, parts in enumerate(LEVELS) if part in parts)


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


def test_imports_point_downwards():
    for path in MODULES:
        own = part_of(path)
        for part in parts_imported(path) - {own}:
            assert level(part) < level(own), f"{path} imports {part}, which does not lie below it"
            assert part not in MAY_NOT.get(own, set()), f"{path} (rows) imports {part} (tensors)"


def test_the_walk_sees_an_upward_import(monkeypatch):
    """The test above can fail."""
    bad = PACKAGE / "store" / "bad.py"
    source = "def f():\n    from sparsedepth.sweep import driver\n"
    monkeypatch.setattr(Path, "read_text", lambda self, **_: source)
    assert parts_imported(bad) == {"sweep"} and level("sweep") > level("store")


def test_rows_never_import_torch():
    for path in MODULES:
        if part_of(path) in ROWS:
            tops = {name.split(".")[0] for name in imports(path)}
            assert not tops & HEAVY, f"{path} imports {tops & HEAVY}"


def test_no_module_cycle():
    graph: dict[str, set[str]] = {}
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    for name, path in names.items():
        graph[name] = {other for other in imports(path) if other in names and other != name}
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, f"cycle: {' -> '.join((*trail, name))}"
        if name not in done:
            for other in graph[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_a_single_run_needs_no_sweep():
    """What `train` imports, and all that those modules import."""
    names = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in MODULES}
    seen: set[str] = set()
    left = ["sparsedepth.run.execute", "sparsedepth.cli.run_progress"]
    while left:
        name = left.pop()
        if name not in seen:
            seen.add(name)
            left += imports(names[name]) & set(names)
    assert not [name for name in seen if name.startswith("sparsedepth.sweep")] and len(seen) > 30


def test_the_command_line_starts_without_torch():
    modules = [f"sparsedepth.{name}" for name in ("cli.commands", "store.connection", "plan.price", "sweep.driver")]
    code = f"import sys, {', '.join(modules)}; print(sorted({HEAVY} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


FORBIDDEN_CALLS = {"eval", "exec", "locals", "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "pickle.load"}
FORBIDDEN_IMPORTS = {"pickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}


def forbidden(source: str) -> list[str]:
    """Names of what a source does that ours must not."""
    found: list[str] = []
    for node in nodes_of(source):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func) if isinstance(node.func, ast.Name | ast.Attribute) else ""
            found += [called] if called in FORBIDDEN_CALLS else []
            found += [
                "trust_remote_code"
                for keyword in node.keywords
                if keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False"
            ]
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [name for name in names if name.split(".")[0] in FORBIDDEN_IMPORTS]
        # Of the entries whose condition holds, such a dict keeps the last alone.
        if isinstance(node, ast.Dict) and any(isinstance(key, ast.Compare | ast.BoolOp) for key in node.keys):
            found.append("dict keyed by conditions")
    return found


def test_nothing_is_unpickled_or_evaluated():
    for path in [*MODULES, *(ROOT / "analysis").glob("*.py"), *(ROOT / "benchmarks").rglob("*.py")]:
        assert not forbidden(path.read_text()), path


def test_the_gate_sees_what_it_must():
    hits = forbidden("import pickle\nimport torch\ntorch.load('x')\neval('1')\nf(trust_remote_code=True)\n{a > 1: 'b'}")
    assert sorted(hits) == ["dict keyed by conditions", "eval", "pickle", "torch.load", "trust_remote_code"]


TEXTS = {"str", "str | None", "bytes", "list[str]", "tuple[str, ...]", "Iterator[str]", "tuple[str, str]"}
ROWS_OF_TEXTS = {"list[list[str]]", "list[tuple[str, ...]]", "dict[str, str]", "list[dict[str, str]]"}
NOT_TEXTS = {"plain_text.terminal_width", "values.plain"}
"""What the functions of words need, and others use."""
INPUT_OUTPUT = {"open", "print", "input", "read_text", "read_bytes", "write_text", "write_bytes", "exists", "glob"}


def faults_of_words(source: str, module: str) -> list[str]:
    """What a module of words must not do: give something else than text, compute with libraries, read or write."""
    nodes = nodes_of(source)
    top_level, found = nodes[0].body, []
    records = [node.name for node in nodes if isinstance(node, ast.ClassDef)]
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            returns = ast.unparse(node.returns).strip("'\"") if node.returns else ""
            parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            typed = [parameter for parameter in parameters if parameter.annotation or parameter.arg == "self"]
            if not returns or len(typed) < len(parameters):
                found.append(f"{node.name} is not typed")
            is_public = node in top_level and node.name[0] != "_" and f"{module}.{node.name}" not in NOT_TEXTS
            if is_public and returns not in TEXTS | ROWS_OF_TEXTS | {*records}:
                found.append(f"{node.name} gives {returns}")
        called = node.func if isinstance(node, ast.Call) else None
        name = called.attr if isinstance(called, ast.Attribute) else called.id if isinstance(called, ast.Name) else ""
        found += [f"{name}()"] if name in INPUT_OUTPUT else []
    return found


def test_words_are_typed_functions_from_records_to_text():
    for path in MODULES:
        if part_of(path) == "words":
            assert not faults_of_words(path.read_text(), path.stem), path
            tops = {name.split(".")[0] for name in imports(path)}
            assert not tops & (HEAVY | {"os", "sys", "subprocess", "numpy", "pandas", "scipy", "duckdb"}), path


def test_the_test_of_words_sees_what_it_must():
    source = "def f(a) -> str: ...\ndef g(a: int) -> float: ...\ndef h() -> str:\n    print(1)\n    return ''"
    assert sorted(faults_of_words(source, "x")) == ["f is not typed", "g gives float", "print()"]
    assert not faults_of_words("def plain(a: int) -> int: ...", "values")


OUTSIDE = ("trackers", "data", "exchange", "probe", "store", "plugins.py", "config/load.py", "cli/input_file.py")
"""Where files of others are read."""
READING = {"open", "os.open", "io.open", "gzip.open", "np.load", "np.memmap", "safe_open", "pa.OSFile", "pa.memory_map"}
READING_METHODS = {"read_text", "read_bytes", "from_file", "ParquetFile", "read_metadata", "connect", "read_array"}
READERS = {
    "data/corpus.py": {"read_text", "ParquetFile"},  # the standard library's own files; an open file
    "data/pipeline.py": {"open", "np.memmap", "read_bytes"},  # token files of our own, by checksum
    "data/tokenizer.py": {"from_file"},  # of a data folder of our own
    "exchange/export.py": {"from_file"},  # written just before
    "plugins.py": {"read_bytes"},  # code that the user names, and that runs
    "probe/folder.py": {"safe_open"},  # what `open_regular` has looked at
    "probe/load.py": {"safe_open"},
    "probe/text.py": {"read_array"},  # an open file
    "store/connection.py": {"connect"},  # databases in memory
    "store/packs.py": {"read_bytes"},  # of a run's work folder
    "store/parquet.py": {"ParquetFile"},  # open files
    "store/run_record.py": {"read_text"},  # written just before
    "store/stored_rows.py": {"pa.OSFile", "read_metadata"},  # by checksum, no link
    "store/table_file.py": {"connect", "read_metadata"},
    "store/table_map.py": {"connect"},
    "trackers/mlflow.py": {"connect", "read_bytes"},  # a copy; a store without links
    "trackers/runs.py": {"connect", "read_text"},  # after `open_regular`; a list of our own
}
"""All others read by `files.open_regular` or `files.read_regular`."""


def readers(source: str) -> set[str]:
    """The calls of a module that open or read a file by another way than the door."""
    called = [node.func for node in nodes_of(source) if isinstance(node, ast.Call)]
    names = {ast.unparse(func) for func in called if isinstance(func, ast.Name | ast.Attribute)}
    methods = {func.attr for func in called if isinstance(func, ast.Attribute)}
    return (names & READING) | (methods & READING_METHODS)


def test_files_from_outside_are_read_through_one_door():
    found = {}
    for path in MODULES:
        place = path.relative_to(PACKAGE).as_posix()
        if part_of(path) in OUTSIDE or place in OUTSIDE:
            found |= {place: calls} if (calls := readers(path.read_text())) else {}
    assert found == READERS
    assert readers("import gzip\nopen('x')\npath.read_text()\ngzip.open(f)") == {"open", "read_text", "gzip.open"}


def definitions(body: list[ast.stmt]) -> dict:
    """What a module or a class defines or imports: name -> the same for a class, else nothing."""
    names: dict = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            names[node.name] = {}
        elif isinstance(node, ast.ClassDef):
            names[node.name] = definitions(node.body)
        elif isinstance(node, ast.Assign):
            names |= {target.id: {} for target in ast.walk(node) if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names[node.target.id] = {}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name: {} for alias in node.names}
    return names


@pytest.fixture(scope="module")
def package_names() -> dict:
    """Parts, modules, and what they define, nested by name."""
    names: dict = {}
    for path in MODULES:
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        place = names
        for part in parts[:-1] if path.stem == "__init__" else parts:
            place = place.setdefault(part, {})
        place |= {
            name: value for name, value in definitions(ast.parse(path.read_text()).body).items() if name not in place
        }
    return names


def is_nested_in(names: dict, parts: list[str]) -> bool:
    return not parts or (parts[0] in names and is_nested_in(names[parts[0]], parts[1:]))


REFERENCE = re.compile(r"`([a-z_]\w*(?:\.\w+)+)(?:\([^`]*\))?`")
FILE_NAME = re.compile(r"\.(py|md|yaml|json|j2|parquet)$")
LIBRARIES = {"pyarrow", "tokenizers", "torch", "transformers", "yaml"}


def dangling(source: str, folder: str, names: dict) -> list[str]:
    """The dotted names in the docstrings of a module of `folder` that lead nowhere: neither to a module of the package
    or what it defines, nor to an attribute that the module's own code reads."""
    nodes = nodes_of(source)
    docstrings = [
        node.value.value
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    references = [name for text in docstrings for name in REFERENCE.findall(text) if not FILE_NAME.search(name)]
    read = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute) and references}
    return [
        name
        for name in references
        if name.split(".")[0] not in LIBRARIES
        and name not in read
        and not is_nested_in(names, name.removeprefix("sparsedepth.").split("."))
        and not is_nested_in(names.get(folder, {}), name.split("."))
    ]


def test_every_name_in_a_docstring_leads_somewhere(package_names):
    for path in MODULES:
        assert not dangling(path.read_text(), path.parent.name, package_names), path


def test_a_missing_name_in_a_docstring_is_seen(package_names):
    known = "`store.connection.open_store`, `probed_model.ProbedModel.block`"
    source = f'"""`store.fenced`, {known}, `self.x`, `sparsedepth.run.no`."""'
    assert dangling(source, "probe", package_names) == ["store.fenced", "self.x", "sparsedepth.run.no"]
    wanted = ["store.fenced", "probed_model.ProbedModel.block", "sparsedepth.run.no"]
    assert dangling(source + "\nself.x", "run", package_names) == wanted


PATH = re.compile(
    r"(?<![\w/.])(?:analysis|benchmarks|docs|sparsedepth|sweeps|tests)/[\w./-]*\b[a-z_]\w*\.(?:md|py|yaml|ipynb)\b"
)


def missing_paths(source: str) -> list[str]:
    """The paths in the strings and comments of a module that name no file of the repository."""
    return [path for path in PATH.findall(source) if not (ROOT / path).exists()]


def test_every_path_named_in_code_exists():
    assert not {path.name: missing for path in MODULES if (missing := missing_paths(path.read_text()))}
    assert missing_paths('A = 1\n"""`docs/no.md`, `docs/sweeps.md`"""  # tests/no.py') == ["docs/no.md", "tests/no.py"]


def test_files_are_small():
    for path in (*MODULES, *(ROOT / "analysis").glob("*.py")):
        n_lines = len(path.read_text().splitlines())
        assert n_lines <= 420, f"{path.relative_to(ROOT)} has {n_lines} lines: is it one concept?"
        assert path.stem not in ("utils", "helpers", "common")


NAMES = {"PIL": "pillow", "yaml": "pyyaml", "markdown_it": "markdown-it-py"}
NAMES |= {"markupsafe": "jinja2", "pydantic_core": "pydantic"}
"""Module -> the package that has it, or always brings it, where the names differ."""

OPTIONAL = {"accelerate", "flash_attn", "lm_eval", "megablocks", "mlflow", "stk", "tensorboard"}
OPTIONAL |= {"trackio", "triton", "wandb"}
"""Imported only where they are used; if absent, a message has the command that installs them."""


def test_every_package_that_is_imported_is_declared():
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    packages = {re.split(r"[^\w-]", requirement)[0] for requirement in declared}
    tops = {name.split(".")[0] for path in MODULES for name in imports(path)}
    imported = {NAMES.get(top, top) for top in tops - sys.stdlib_module_names - {"sparsedepth"}}
    assert imported - packages - OPTIONAL == set()
