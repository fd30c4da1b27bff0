"""The shape of the library: imports point one way, rows never see torch, and nothing is unpickled or evaluated."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "sparsedepth"
ROOT = PACKAGE.parent

LEVELS = [
    {"files", "quantities"},
    {"config"},
    {"model", "data", "store"},
    {"train", "probe", "plan", "effects", "scaling"},
    {"measure", "recipe", "plots", "toy", "exchange"},
    {"run"},
    {"sweep"},
    {"report"},
    {"cli"},
]
"""Lowest first: a part may import parts of lower levels, and itself."""

TENSORS = {"model", "data", "train", "probe", "measure", "toy", "exchange"}
ROWS = ("config", "plan", "store", "effects", "scaling", "recipe", "plots", "report")
MAY_NOT = {part: TENSORS for part in ROWS}

TOY = {"config": "config", "record": "store", "exponents": "effects", "figure": "plots"}
"""The toy stands in one folder: what each of its modules without torch counts as. The others are the part `toy`."""

HEAVY = {"torch", "transformers", "datasets"}


def part_of(path: Path) -> str:
    return part_named([*path.relative_to(PACKAGE).with_suffix("").parts])


def part_named(names: list[str]) -> str:
    """Of a module's names below the package: ['toy', 'record'] counts as store."""
    return TOY.get(names[1], "toy") if names[0] == "toy" and len(names) > 1 else names[0]


def imports(path: Path) -> set[str]:
    """Every module that a file imports, at its top or in a function."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            module = node.module or ""
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def parts_imported(path: Path) -> set[str]:
    return {
        part_named(name.split(".")[1:])
        for name in imports(path)
        if name.startswith("sparsedepth.") and not name.endswith("__version__")
    }


def level(part: str) -> int:
    return next(i for i, parts in enumerate(LEVELS) if part in parts)


MODULES = [path for path in sorted(PACKAGE.rglob("*.py")) if path != PACKAGE / "__init__.py"]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_point_downwards(path):
    own = part_of(path)
    for part in parts_imported(path) - {own}:
        assert level(part) < level(own), f"{own} imports {part}, which does not lie below it"
        assert part not in MAY_NOT.get(own, set()), f"{own} (rows) imports {part} (tensors)"


def test_the_walk_sees_an_upward_import(monkeypatch):
    """The test above can fail."""
    bad = PACKAGE / "store" / "bad.py"
    source = "def f():\n    from sparsedepth.sweep import driver\n"
    monkeypatch.setattr(Path, "read_text", lambda self, **_: source)
    assert parts_imported(bad) == {"sweep"} and level("sweep") > level("store")


@pytest.mark.parametrize("part", ROWS)
def test_rows_never_import_torch(part):
    for path in MODULES:
        if part_of(path) == part:
            tops = {name.split(".")[0] for name in imports(path)}
            assert not tops & HEAVY, f"{path.name} imports {tops & HEAVY}"


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


@pytest.mark.parametrize("module", ["cli.main", "store.connection", "plan.price", "sweep.status"])
def test_the_command_line_starts_without_torch(module):
    code = f"import sys, sparsedepth.{module}; print(sorted({HEAVY} & set(sys.modules)))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "torch.save", "yaml.load", "yaml.unsafe_load", "pickle.load"}
FORBIDDEN_IMPORTS = {"pickle", "dill", "joblib", "cloudpickle", "shelve", "marshal"}


def forbidden(source: str) -> list[str]:
    """Names of what a source does that ours must not."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            found += [called] if called in FORBIDDEN_CALLS else []
            found += [
                "trust_remote_code"
                for keyword in node.keywords
                if keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) != "False"
            ]
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        found += [name for name in names if name.split(".")[0] in FORBIDDEN_IMPORTS]
    return found


@pytest.mark.parametrize(
    "path",
    [*MODULES, *sorted((ROOT / "analysis").glob("*.py")), *sorted((ROOT / "benchmarks").glob("*.py"))],
    ids=lambda path: path.name,
)
def test_nothing_is_unpickled_or_evaluated(path):
    assert not forbidden(path.read_text())


def test_the_gate_sees_what_it_must():
    hits = forbidden("import pickle\nimport torch\ntorch.load('x')\neval('1')\nf(trust_remote_code=True)")
    assert sorted(hits) == ["eval", "pickle", "torch.load", "trust_remote_code"]


def test_files_are_small():
    for path in MODULES:
        n_lines = len(path.read_text().splitlines())
        assert n_lines <= 420, f"{path.relative_to(ROOT)} has {n_lines} lines: is it one concept?"
        assert path.stem not in ("utils", "helpers", "common")
