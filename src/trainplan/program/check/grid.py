"""Faults shown in their place: the lists of the ranks around them."""

from __future__ import annotations

from trainplan.program.program import Program

SHOWN = 12  # ranks; and half as many operations before the first that is marked


def grid(program: Program, marked: set[int]) -> str:
    """The lists of the ranks around the marked operations, which stand between » and «.

    One that is in none of the lists that it belongs to is put at the end of those, as missing.
    """
    lines = []
    for rank in range(program.world):
        ops = [int(op) for op in program.lists.row(rank)]
        there = set(ops)
        missing = [f"»{program.name(op)} missing«" for op in sorted(marked - there) if rank in program.members(op)]
        places = [i for i, op in enumerate(ops) if op in marked]
        if not places and not missing:
            continue
        first = max(0, places[0] - SHOWN // 2) if places else 0
        shown = ops[first : first + 2 * SHOWN]
        cells = [f"»{program.name(op)}«" if op in marked else program.name(op) for op in shown]
        before, after = "… " if first else "", " …" if first + len(shown) < len(ops) else ""
        lines.append(f"  rank {rank}: {before}{' '.join(cells)}{after} {' '.join(missing)}".rstrip())
        if len(lines) >= SHOWN:
            break
    return "\n".join(lines)
