"""`check` lists every fault and shows its place. (What it finds: test_check_*.py, a file for each noun.)"""

from dataclasses import replace

import pytest

from tests.program.legality import PROFILE, replicas, two_stages
from tests.program.surgery import change, find
from trainplan.errors import ProgramError
from trainplan.plan.plan import plan
from trainplan.program.check import check
from trainplan.program.lower import lower


def test_the_programs_that_were_broken_are_legal() -> None:
    for program in (two_stages(), replicas(), two_stages(schedule="gpipe"), replicas(recompute="full")):
        assert check(program) is program


def test_all_faults_are_listed_and_many_are_counted() -> None:
    program = two_stages()
    for op in range(len(program)):
        if program.name(op).startswith("1RECV"):
            program = change(program, "bytes", op, 11)
    with pytest.raises(ProgramError, match=r"4 fault\(s\)") as caught:
        check(program)
    assert str(caught.value).count("expects 11 bytes") == 4
    many = replace(program, version=program.version + 5)
    with pytest.raises(ProgramError, match="… and") as caught:
        check(many)
    assert len(str(caught.value).splitlines()) < 20  # and so the message stays one that can be read


def test_grid_shows_the_part_of_a_long_list_where_the_fault_is() -> None:
    program = lower(plan(pp=2, micro=60, schedule="gpipe", stages=(1,), blocks=2), PROFILE, batch=60)
    program = change(program, "version", find(program, "1B30"), 1)
    with pytest.raises(ProgramError) as caught:
        check(program)
    (line,) = [line for line in str(caught.value).splitlines() if "rank 1:" in line]
    assert "… " in line
    assert line.endswith(" …")
    assert "1B31 1SEND_B31 »1B30« 1SEND_B30" in line
