"""The docs tell the truth: their commands run, their generated tables are current, their links lead somewhere."""

import importlib.util
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

from trainplan import cli
from trainplan.bench.pool import stop_pools
from trainplan.cluster.overrides import KEYS, with_overrides
from trainplan.cluster.parse import cluster as parse_cluster
from trainplan.cluster.probe.probe import probe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
# Run in order, in one folder: later commands use what earlier ones wrote.
COMMANDS = [
    line
    for page in PAGES
    for block in re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    for line in block.splitlines()
    if line.startswith(("trainplan ", "python "))
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that looks like a clone, with a cache of its own."""
    place = tmp_path_factory.mktemp("docs")
    for name in ("examples", "benchmarks", "docs", "src"):
        (place / name).symlink_to(ROOT / name)
    with pytest.MonkeyPatch.context() as patch:  # this machine, known already: commands need not probe it at length
        patch.setenv("XDG_CACHE_HOME", str(place / "cache"))
        probe(quick=True)
    stop_pools()  # processes that are kept would stay in the folder where they were started
    yield place
    stop_pools()


@pytest.mark.parametrize("line", [c for c in COMMANDS if c.startswith("trainplan ")])
@pytest.mark.usefixtures("quick_start")
def test_command(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process: elsewhere most commands would take less than to make a process ready for them."""
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    done = CliRunner().invoke(cli.app, shlex.split(line)[1:], catch_exceptions=False)
    assert done.exit_code == 0, done.output[-4000:]
    assert done.stdout.strip()


STARTS = re.compile(r"```sh\n(trainplan run [^\n]* --dry-run [^\n]*)\n(torchrun [^\n]*)\n```")


@pytest.mark.usefixtures("quick_start")
def test_a_job_is_started_by_torchrun(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every torchrun line of the docs follows the command that writes its job."""
    page = (ROOT / "docs" / "guide.md").read_text()
    pairs = STARTS.findall(page)
    assert len(pairs) == len(re.findall(r"^torchrun ", page, re.MULTILINE)) == 1
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    for writes, starts in pairs:
        prepared = CliRunner().invoke(cli.app, shlex.split(writes)[1:], catch_exceptions=False)
        line = [sys.executable, "-m", "torch.distributed.run", *shlex.split(starts)[1:]]
        done = subprocess.run(line, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, prepared.output + done.stderr[-4000:]
        assert "step 4/4" in done.stdout
        assert (folder / "by-hand" / "rank-1.json").is_file()


def test_the_guide_has_every_key_of_a_change() -> None:
    page = (ROOT / "docs" / "guide.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.*) \| `\1=(\S+)` \|$", page, re.MULTILINE)
    assert [(key, what) for key, what, _ in rows] == [(key, what) for key, (what, _) in KEYS.items()]
    start = parse_cluster("2x8xA100-80")
    for key, _, value in rows:
        assert f"changed: {key}={value}" in with_overrides(start, {key: value}).notes


def test_make_targets_named_in_the_docs_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page in PAGES:
        # As code: between ` and `, or at the beginning of a line of a command block.
        for target in re.findall(r"(?:`|^ *\$? ?)make\s([a-z-]+)", page.read_text(), re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name} names make {target}"


def loaded(name: str) -> ModuleType:
    """A script of docs/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_drawings_are_current() -> None:
    drawings = loaded("drawings")
    assert (ROOT / drawings.PROFILE).read_text() == drawings.profile(), "run: python docs/drawings.py"
    page = (ROOT / "docs" / "orders.md").read_text()
    assert drawings.rewritten(page) == page, "run: python docs/drawings.py"


def test_every_order_of_work_is_drawn() -> None:
    from trainplan.plan.plan import WORDS

    page = (ROOT / "docs" / "orders.md").read_text()
    sections = dict(re.findall(r"^## (\S+)\n(.*?)(?=^## |\Z)", page, re.DOTALL | re.MULTILINE))
    for word in WORDS["schedule"]:
        assert f"| [`{word}`](#{word}) |" in page, f"{word} is not in the table"
        drawn = re.search(rf"^\$ trainplan timeline .*schedule={word} ", sections.get(word, ""), re.MULTILINE)
        assert drawn, f"{word} has no drawing"


def test_generated_tables_are_current() -> None:
    tables = loaded("tables")
    for page in (ROOT / "docs").glob("*.md"):
        assert tables.rewritten(page.read_text()) == page.read_text(), f"run: python docs/tables.py ({page.name})"
    kept = (ROOT / "src" / "trainplan" / "bench" / "accuracy.json").read_text()
    assert tables.known_errors(*tables.ACCURACY) == kept, "run: python docs/tables.py"


NOT_OURS = "Xu and others (2021, table 2) measured"  # which are published, and where
MADE_BY = re.compile(r"(?:^|`|\$ )\s*(?:taskset -c \S+ )?(?:python|trainplan|make|bench)\s", re.MULTILINE)
NUMBERS = re.compile(r"\d\.\d|\d\s?(?:%|ms|s|GiB|×)(?!\w)")


def sections(page: str) -> list[list[str]]:
    """The lines of a page between one heading and the next, code left out of what is a heading."""
    found, code = [list[str]()], False
    for line in page.splitlines():
        code ^= line.startswith("```")
        if re.match(r"#+ ", line) and not code:
            found.append([])
        found[-1].append(line)
    return found


def tables_of(lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """The first cell of every table, and its rows."""
    for at, line in enumerate(lines):
        if re.fullmatch(r"\|[-:| ]+\|", line):
            rows = itertools.takewhile(lambda row: row.startswith("|"), lines[at + 1 :])
            yield lines[at - 1].split("|")[1].strip(), list(rows)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_table_of_numbers_says_what_makes_it(page: Path) -> None:
    """In its section: the command, with the data that it leaves; or whose numbers they are."""
    for lines in sections(page.read_text()):
        text = "\n".join(lines)
        for cell, rows in tables_of(lines):
            if sum(bool(NUMBERS.search(row)) for row in rows) > 1:
                made = MADE_BY.search(text) or NOT_OURS in " ".join(text.split())
                assert made, f"{page.name}, {lines[0]}: the table of »{cell}« has no command"


def test_tables_name_the_shapes_of_models() -> None:
    """A name that stands for several models says which, below each table that has it."""
    pages = "".join(page.read_text() for page in PAGES)
    blocks = re.findall(r"<!-- accuracy .*?<!-- /accuracy -->", pages, re.DOTALL)
    assert len(blocks) > 10
    for block in blocks:
        assert ("\n| gpt |" in block) == bool(re.search(r"^gpt is `gpt:layers=\d+,hidden=\d+", block, re.MULTILINE))


def test_what_recommend_does_not_search_for_is_said() -> None:
    from trainplan.plan.plan import WORDS
    from trainplan.search.space import outlines

    found = [plan for pp in (2, 4, 8) for plan in outlines(1, pp, 32, in_parts=True)]
    left_out = set(WORDS["schedule"]) - {plan.schedule for plan in found}
    guide = " ".join((ROOT / "docs" / "guide.md").read_text().split())
    said = re.search(r"`recommend` searches all orders of work but (.*?),", guide)
    assert said
    assert set(re.findall(r"`(\S+?)`", said[1])) == left_out
    assert {plan.pairs for plan in found} == {1, 2}
    assert "with one or two pairs of directions, and different numbers of ranks a stage on up to four devices" in guide
    assert "every plan" not in (ROOT / "README.md").read_text()


def test_every_system_is_carried_by_something() -> None:
    from trainplan.plan.systems import SYSTEMS

    assert len(SYSTEMS) > 100
    assert [key for key, row in SYSTEMS.items() if not row.carried_by] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
