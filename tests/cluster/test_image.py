"""The Dockerfile, where docker itself is not installed: its instructions, what it copies, and its pins."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINES = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if line and not line.startswith("#")]
INSTRUCTIONS = [line.partition(" ")[::2] for line in LINES]


def arguments(name: str) -> list[str]:
    return [rest for instruction, rest in INSTRUCTIONS if instruction == name]


def test_every_instruction_is_one_of_docker():
    known = {"ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "CMD"}
    assert {name for name, _ in INSTRUCTIONS} == known and LINES[0].startswith("ARG BASE=")
    assert arguments("FROM") == ["${BASE}"]
    declared = {argument.partition("=")[0] for argument in arguments("ARG")}
    assert set(re.findall(r"\$\{(\w+)\}", "\n".join(LINES))) == declared


def test_what_it_copies_exists_and_is_sent_to_docker():
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {source for argument in arguments("COPY") for source in argument.split()[:-1]}
    assert copied == sent and all((ROOT / source).exists() for source in copied)
    pyproject = (ROOT / "pyproject.toml").read_text()
    assert all(name in copied for name in re.findall(r'(?:readme|license-files) = \[?"([^"]+)"', pyproject))


def test_base_and_torch_are_those_of_the_makefile():
    makefile = (ROOT / "Makefile").read_text()
    for name in ("BASE", "TORCH"):
        (pinned,) = re.findall(rf"^{name} \?= (.+)$", makefile, re.MULTILINE)
        assert f"{name}={pinned}" in arguments("ARG") and not pinned.endswith("latest")


def test_the_image_of_the_kubernetes_job_can_be_built():
    page = (ROOT / "docs" / "depth-job.yaml").read_text()
    (image,) = re.findall(r"image: (\S+)", page)
    (built, base) = re.findall(r"make image IMAGE=(\S+) BASE=(\S+);", page)[0]
    assert built == image
    assert base in (ROOT / "Dockerfile").read_text()
