"""The audit of dependencies: what it says where a database answers, and where none does."""

from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

LOADER = SourceFileLoader("audit", str(Path(__file__).parent.parent / ".ci" / "audit"))


@pytest.fixture
def audit():
    module = module_from_spec(spec_from_loader("audit", LOADER))
    LOADER.exec_module(module)
    return module


def test_a_hole_fails_unless_it_is_waived_and_silence_is_no_audit(audit, monkeypatch):
    whole = {"name": "numpy", "version": "2.4.6", "vulns": []}
    hole = {"name": "jinja2", "version": "3.1.0", "vulns": [{"id": "CVE-1"}]}
    unknown = {"name": "torch", "skip_reason": "not found"}
    assert audit.judge([whole, unknown]) == (["audit: 1 of 2 packages audited, 0 open holes"], 0)
    assert audit.judge([whole, hole])[1] == 1 and "CVE-1: OPEN" in audit.judge([whole, hole])[0][0]
    monkeypatch.setitem(audit.WAIVED, "CVE-1", "never called, until 2027")
    lines, status = audit.judge([hole])
    assert status == 0 and lines[0] == "audit: jinja2 3.1.0: CVE-1: waived: never called, until 2027"
    for silent in ([], [unknown]):
        lines, status = audit.judge(silent)
        assert status == 0 and "nothing was audited (waiver: SECURITY.md)" in lines[0]
