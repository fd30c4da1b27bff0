"""What a release needs: one version, a description without links that break, a site, all that the tests read."""

import re
import subprocess
import tomllib
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest
import yaml

import sparsedepth

ROOT = Path(__file__).parent.parent
RELATIVE = re.compile(r"\]\((?!\w+://|#)([^()\s#]+)")


def script(name):
    loader = SourceFileLoader(f"ci_{name}", str(ROOT / ".ci" / name))
    module = module_from_spec(spec_from_loader(loader.name, loader))
    loader.exec_module(module)
    return module


def test_the_version_and_its_day_are_stated_once():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    changelog = (ROOT / "CHANGELOG.md").read_text()
    version, day = re.search(r"^## (\S+) \((\S+)\)", changelog, re.MULTILINE).groups()
    assert citation["version"] == sparsedepth.__version__ == version
    assert str(citation["date-released"]) == day


def test_the_description_of_the_package_has_no_link_that_an_index_would_break():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / project["readme"]).read_text()
    assert not RELATIVE.search(text) and len(text.split()) < 300
    assert RELATIVE.search("see [x](docs/x.md)") and not RELATIVE.search("[x](https://a.b/c) [y](#z)")


def test_the_site_has_every_page_and_no_link_out_of_it(tmp_path, capsys):
    site = script("site")
    assert site.main(tmp_path) == 0
    for page in tmp_path.glob("*.md"):
        for target in RELATIVE.findall(page.read_text()):
            assert (tmp_path / target).exists(), (page.name, target)
    listed = {name for name in re.findall(r"[\w-]+\.md", (ROOT / "mkdocs.yml").read_text())}
    assert listed == {page.name for page in tmp_path.glob("*.md")}


def test_the_site_sees_a_link_to_nothing(tmp_path, monkeypatch, capsys):
    site = script("site")
    monkeypatch.setattr(site, "ROOT", tmp_path)
    (tmp_path / "docs").mkdir()
    (tmp_path / "a.py").write_text("")
    (tmp_path / "README.md").write_text("[kept](docs/b.md#c), [its text](a.py), [lost](docs/gone.md)")
    (tmp_path / "docs/b.md").write_text("[home](../README.md)")
    assert site.main(tmp_path / "out") == 1 and "README.md: docs/gone.md" in capsys.readouterr().err
    assert (tmp_path / "out/index.md").read_text() == "[kept](b.md#c), its text, lost"
    assert (tmp_path / "out/b.md").read_text() == "[home](index.md)"


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="the source distribution itself")
def test_the_source_distribution_has_every_folder_of_the_checkout():
    grafted = set(re.findall(r"^(?:graft|recursive-include) (\S+)", (ROOT / "MANIFEST.in").read_text(), re.MULTILINE))
    ignored = {line.strip("/\n") for line in (ROOT / ".gitignore").read_text().splitlines()}
    hidden = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name.startswith(".")} - {".ci"}
    folders = {path.name for path in ROOT.iterdir() if path.is_dir()} - hidden
    assert {name for name in folders if name not in ignored and not name.endswith(".egg-info")} == grafted | {
        "sparsedepth"
    }


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="what is tracked is not known")
def test_what_travels_to_a_machine_with_a_gpu_leaves_room_for_what_is_carried():
    """Tracked files: at most 50 of the 64 MiB; what is built beforehand, such as kernels, has the rest."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    files = [ROOT / name for name in names.split("\0") if name]
    assert len(files) > 500 and sum(file.stat().st_size for file in files if file.exists()) <= 50 * 2**20
