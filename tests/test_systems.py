"""Every letter that `trainplan systems` shows is backed by tests that exist, were run, and passed."""

import evidence
from trainplan.plan.systems import SYSTEMS


def test_markers_name_systems_and_letters(gathered):
    for key, letter, test in sorted(evidence.rows(gathered.table)):
        assert key in SYSTEMS, f"{test} is marked with a system that there is not: {key}"
        assert letter in SYSTEMS[key].needs, f"{test}: {key} needs {SYSTEMS[key].needs}, not {letter}"
        assert key in test.replace("_", "-"), f"{test} backs {key}, and its id must carry that key"


def test_kept_evidence_is_what_is_collected(gathered):
    """Of the test files that this session collected whole; in a whole session there is nothing else."""
    kept = evidence.rows(evidence.read())
    if not gathered.whole:
        kept = {row for row in kept if row[2].split("::")[0] in gathered.files}
    found = {row for row in evidence.rows(gathered.table) if row[2].split("::")[0] in gathered.files}
    hint = "run: pytest tests --collect-only -q --write-evidence"
    assert sorted(kept - found) == [], f"kept, but there is no such test ({hint})"
    assert sorted(found - kept) == [], f"marked, but not kept ({hint})"


def test_a_session_fails_when_a_backing_test_was_not_run_or_did_not_pass(monkeypatch, request):
    """What the end of a session asks, here of a table with three tests."""
    table = {"ddp": {"P": ["passes", "fails", "is not run"]}}
    monkeypatch.setattr(evidence, "read", lambda: table)
    session = evidence.Evidence(request.config)
    session.outcome = {"passes": "passed", "fails": "failed", "another": "failed"}
    monkeypatch.setattr(evidence.Evidence, "whole", True)
    assert session.unbacked() == {"fails": "failed", "is not run": "not run"}
    monkeypatch.setattr(evidence.Evidence, "whole", False)
    assert session.unbacked() == {"fails": "failed"}
