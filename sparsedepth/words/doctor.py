"""The report of `doctor`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sparsedepth.cli.doctor import Finding

TITLES = {
    "system": "This machine",
    "package": "Required packages",
    "optional": "Optional",
    "attention": "Attention (* = auto)",
    "experts": "Experts (* = auto)",
}


def doctor_text(findings: "Sequence[Finding]", healthy: bool) -> str:
    """What was found, by group, with the fix of what does not work."""
    lines = []
    for group, title in TITLES.items():
        found = [finding for finding in findings if finding.group == group]
        lines += [title, *map(finding_text, found)] if found else []
    verdict = "sparsedepth is ready." if healthy else "sparsedepth cannot run: fix the missing or broken parts above."
    return "\n".join([*lines, verdict])


def finding_text(finding: "Finding") -> str:
    """' * torch            2.13.0', and a line with the fix."""
    is_expected = finding.group in ("system", "package") and finding.state == "ok"
    state = "" if is_expected else f"{finding.state}  "
    fix = f"\n     fix: {finding.fix}" if finding.fix else ""
    return f" {'*' if finding.chosen else ' '} {finding.name:16} {state}{finding.fact}{fix}"
