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


def test_every_backing_test_was_run_and_passed(gathered):
    """Comes last. In a session of some tests it looks at those that were run."""
    outcome = gathered.outcome
    kept = {test for _, _, test in evidence.rows(evidence.read())}
    wanted = kept if gathered.whole else kept & set(outcome)
    bad = {test: outcome.get(test, "not run") for test in wanted if outcome.get(test) != "passed"}
    assert bad == {}
