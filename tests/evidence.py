"""Which tests back which letter of which system.

    @pytest.mark.system("ddp", "P")
    def test_ddp_…

says that this test is why `trainplan systems` shows the letter P for ddp. `src/trainplan/plan/evidence.json` keeps
those ids with the package; it must be exactly what is collected (`tests/test_systems.py`), and at the end of a session
the tests in it must have been run and have passed, or the session fails. (So slow tests and those of a GPU back
nothing, whatever they are marked with: they are not run every day.) Rewrite it after adding a marker:

    pytest tests --collect-only -q --write-evidence
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FILE = Path(__file__).parents[1] / "src" / "trainplan" / "plan" / "evidence.json"
DAILY = ("", "not slow and not gpu")  # what `-m` may say in a session that counts as whole

Table = dict[str, dict[str, list[str]]]  # key → letter → ids


def read(path: Path = FILE) -> Table:
    return json.loads(path.read_text(encoding="utf-8"))


def rows(table: Table) -> set[tuple[str, str, str]]:
    return {(key, letter, test) for key, letters in table.items() for letter, ids in letters.items() for test in ids}


class Evidence:
    """A pytest plugin: gathers the markers, and what became of the tests that carry them."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.table: Table = {}
        self.files: set[str] = set()  # test files of which every test was collected
        self.outcome: dict[str, str] = {}

    @property
    def whole(self) -> bool:
        """Whether this session is one of all the tests that run every day."""
        root = Path(__file__).parent
        places = {Path(self.config.invocation_params.dir, arg).resolve() for arg in self.config.args}
        options = self.config.option
        return places in ({root}, {root.parent}) and not options.keyword and options.markexpr in DAILY

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        # First, so that tests which -m or -k leave out are seen too.
        single = {arg.split("::")[0] for arg in self.config.args if "::" in arg}
        self.files = {item.nodeid.split("::")[0] for item in items} - single
        daily = [item for item in items if not any(map(item.get_closest_marker, ("slow", "gpu")))]
        for item in daily:
            for mark in item.iter_markers("system"):
                key, letter = mark.args
                ids = self.table.setdefault(key, {}).setdefault(letter, [])
                if item.nodeid not in ids:
                    ids.append(item.nodeid)
        if self.config.option.write_evidence:
            if not self.whole:
                raise pytest.UsageError("--write-evidence needs all tests: pytest tests --collect-only")
            tidy = {
                key: {letter: sorted(self.table[key][letter]) for letter in "PSR" if letter in self.table[key]}
                for key in sorted(self.table)
            }
            FILE.write_text(json.dumps(tidy, indent=1) + "\n", encoding="utf-8")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            self.outcome[report.nodeid] = report.outcome
        elif report.when == "call":
            self.outcome.setdefault(report.nodeid, "passed")

    def unbacked(self) -> dict[str, str]:
        """The tests that back a letter and did not pass. In a session of some tests: of those that were run."""
        kept = {test for _, _, test in rows(read())}
        wanted = kept if self.whole else kept & set(self.outcome)
        return {
            test: self.outcome.get(test, "not run") for test in sorted(wanted) if self.outcome.get(test) != "passed"
        }

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        # Of the processes of `pytest -n 3`, only the one that hears of all tests knows.
        if not hasattr(self.config, "workerinput") and not self.config.option.collectonly and self.unbacked():
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.config.option.collectonly:
            for test, outcome in self.unbacked().items():
                terminalreporter.write_line(f"a letter of `trainplan systems` is not backed: {test} ({outcome})")
