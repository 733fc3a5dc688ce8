"""Progress goes to stderr: a bar on a terminal; elsewhere nothing, or lines where they were asked for."""

import pytest

from trainplan.report.progress import progress


@pytest.mark.parametrize(("lines", "said"), [(True, "first …\nsecond …\n"), (False, "")])
def test_away_from_a_terminal(lines: bool, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with progress(lines=lines) as report:
        report("first", 0.0)
        report("second", 0.5)
    assert capsys.readouterr() == ("", said)
