"""A sample of the faults that `make faults` tries in full: nothing is lost, whatever dies."""

from __future__ import annotations

from pathlib import Path

import pytest
from faults import damage, deaths, many
from faults.__main__ import main
from faults.inject import KILL, POWER
from faults.works import Bench, Row
from helpers import Forks
from toys import Toys

from xformer.data.errors import BadInput


@pytest.fixture(scope="module")
def bench(forks: Forks, data: Toys, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(data, tmp_path_factory.mktemp("faults"), [forks])


def good(*rows: Row) -> None:
    """Assert that nothing was lost or wrong, and that something was tried."""
    for row in rows:
        assert (row.lost, row.wrong) == (0, 0), (row.fault, row.notes)
        assert row.times > 0, row.fault


def test_bad_arguments_are_refused_before_the_first_fault(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    page = tmp_path / "page.md"
    page.write_text("no marks\n")
    for line, message in (
        (f"--output {page}", "page.md has no place for the table"),
        ("--kills 0", "--kills: 0 is not allowed; it must be at least 1"),
        ("--only kils", "'kils' is none of kills, moments"),
    ):
        monkeypatch.setattr("sys.argv", ["faults", *line.split()])
        with pytest.raises(BadInput, match=message):
            main()


@pytest.mark.parametrize(
    ("name", "fault", "most"),
    [
        ("preprocessing", KILL, 10),
        ("preprocessing", POWER, 6),
        ("surgery", KILL, 6),
        ("surgery", POWER, 6),
        ("training", KILL, 4),
    ],
)
@pytest.mark.slow
def test_killed_at_an_operation_on_files(bench: Bench, name: str, fault: str, most: int) -> None:
    assert len(bench.operations(name)) > 25
    good(deaths.killed_at_operations(bench, name, fault, most, jobs=1))


@pytest.mark.parametrize("fault", [KILL, POWER])
def test_killed_between_the_renames_of_a_replacement(bench: Bench, fault: str) -> None:
    """The older output is put back, and the same command replaces it."""
    row = deaths.killed_at_operations(bench, "surgery", fault, 10**6, jobs=1, only="rename ")
    good(row)
    # 1. New to its place: refused, because an older output is there. 2. The older one aside. 3. New
    # to its place. 4. The older one to where it is deleted.
    assert row.times == 4


def test_killed_at_random(bench: Bench) -> None:
    good(deaths.killed_at_random(bench, "preprocessing", 4, jobs=1))


@pytest.mark.parametrize("name", ["preprocessing", "surgery"])
@pytest.mark.parametrize("kind", ["full", "error", "read-only"])
def test_a_disk_that_refuses(bench: Bench, name: str, kind: str) -> None:
    good(deaths.refused_by_the_disk(bench, name, kind, 3, jobs=1))


@pytest.mark.parametrize("name", ["preprocessing", "surgery"])
def test_short_writes(bench: Bench, name: str) -> None:
    good(deaths.short_writes(bench, name))


@pytest.mark.parametrize("what", ["store", "checkpoint"])
def test_damage_of_every_file_is_noticed_and_named(bench: Bench, what: str) -> None:
    good(*damage.every_file(bench, what, flips=1))


def test_many_at_once(bench: Bench) -> None:
    """One process has a run, and two write to one output; a store is replaced while it is read."""
    good(many.same_run(bench, others=2), many.same_output(bench, times=1))
    good(*many.replaced_while_read(bench, seconds=0.5))


def test_told_to_stop_in_the_middle(bench: Bench) -> None:
    good(*deaths.told_to_stop(bench, "training", ["a checkpoint"]))


def test_what_is_tried_is_noticed(bench: Bench, tmp_path: Path) -> None:
    """This tests the harness itself: work that goes on wrongly is counted as wrong."""
    work, reference = bench.works["preprocessing"], bench.reference("preprocessing")
    with bench.forks() as forks:
        work.prepare(tmp_path)
        (tmp_path / "foreign").mkdir()
        assert work.finish(forks, tmp_path, reference).startswith("wrong: ['foreign', 'store']")
        (tmp_path / "other").mkdir()
        (tmp_path / "other/store").mkdir()
        assert work.finish(forks, tmp_path / "other", reference).startswith("lost: ")
