"""The revisions of a model: the branches and tags of a hub's repository, or the folders of checkpoints in a folder.

Without a network, or with HF_HUB_OFFLINE=1, they are those whose commits the hub's cache names in its `refs`."""

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsedepth.files import digest, local_path, read_regular
from sparsedepth.probe.load import check_hub_name

_STEP = (
    re.compile(r"step[-_]?(\d+)(?![\d.]*[kmb])", re.IGNORECASE),
    re.compile(r"(\d+)(?![\d.]*[kmb]|.*\d)", re.IGNORECASE),
)
"""'step1000', 'stage1-step1000-tokens4B'; else the last number: 'checkpoint-1000'. 'step10k' tells no step."""


@dataclass(frozen=True, kw_only=True)
class Revision:
    name: str
    source: str
    """as `probe.load.load_model` takes it"""
    key: str
    """changes where its files do"""

    @property
    def step(self) -> int | None:
        found = next(filter(None, (pattern.search(self.name) for pattern in _STEP)), None)
        return int(found[1]) if found else None


def revisions(model: str, wanted: Sequence[str]) -> list[Revision]:
    """Those whose names are `wanted` or fit a pattern ('step*'), each once. Raises ValueError where nothing fits a
    pattern; a name that is not there is left to loading."""
    folder = local_path(model)
    if folder.is_dir():
        known = {place.name: files_key(place) for place in folder.iterdir() if place.is_dir() and place.name[0] != "."}
    else:
        known = _of_hub(model)
    names = dict[str, None]()
    for each in wanted:
        found = fnmatch.filter(known, each)
        if not found and re.search(r"[*?[]", each):
            raise ValueError(f"--revisions {each!r}: none of {model!r} fits; it has {', '.join(sorted(known)[:5])}")
        names |= dict.fromkeys(sorted(found) or [each])
    source = f"{folder}/{{}}" if folder.is_dir() else f"{model}@{{}}"
    return [Revision(name=name, source=source.format(name), key=known.get(name, name)) for name in names]


def files_key(folder: Path) -> str:
    """A digest of names, sizes and times of the files in a folder."""
    files = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    return digest([[name, stat.st_size, stat.st_mtime_ns] for name, stat in files])


def _of_hub(name: str) -> dict[str, str]:
    """Branches and tags -> their commits. Raises ValueError where neither the hub nor its cache knows any."""
    check_hub_name(name)
    from huggingface_hub import HfApi, constants
    from huggingface_hub.file_download import repo_folder_name

    try:
        refs = HfApi().list_repo_refs(name)
        return {ref.name: ref.target_commit for ref in (*refs.branches, *refs.tags)}
    except Exception as error:  # network, permission and names each raise their own
        told = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    cached = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"), "refs")
    refs = [path for path in cached.rglob("*") if path.is_file()]
    found = {str(path.relative_to(cached)): read_regular(path).decode().strip() for path in refs}
    if not found:
        raise ValueError(
            f"the hub does not list the revisions of {name!r} ({told}), nor does its cache; "
            "check the name and the network; of a gated model, ask for access on its page, then `hf auth login`"
        )
    return found
