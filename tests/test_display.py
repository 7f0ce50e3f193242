"""Printing: text from data is escaped, lines stand above a terminal's bars, and a log gets the same
lines.
"""

from __future__ import annotations

import io
import re

import pytest

from xformer.data import display
from xformer.data.display import Progress, duration, put, say

EVIL = "\x1b[31m{x}\r"
SHOWN = r"\x1b[31m{x}\r"


class Terminal(io.StringIO):
    """A terminal for both standard streams. Without `columns` its width is unknown."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """The lines that it shows now, without empty ones."""
        rows: dict[int, list[str]] = {}
        row = column = 0
        for sign in re.findall(r"\x1b\[A|[^\x1b]", self.getvalue()):
            if sign == "\x1b[A":
                row -= 1
            elif sign in "\r\n":
                row, column = row + (sign == "\n"), 0
            else:
                line = rows.setdefault(row, [])
                line[column : column + 1] = sign
                column += 1
        lines = ("".join(rows[number]).rstrip() for number in sorted(rows))
        return [line for line in lines if line]


def test_messages_stand_above_the_bars(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are two bars at once, as when a run validates. The inner one disappears and the outer
    one stays.
    """
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(display, "REDRAW", 0)
    monkeypatch.setattr(display.time, "monotonic", lambda: 100.0)
    with Progress("training", 4, "steps", 1, lines=False, stay=True) as outer:
        assert terminal.screen() == ["training 1/4 steps |##5"]
        outer.advance(1, **{"loss": 7.12345, "tokens/s": 12345.6})
        bar = "training 2/4 steps, 0 s left, loss 7.123, tokens/s 12,346 |#####"
        assert terminal.screen() == [bar]
        with Progress(EVIL, 8, "rows") as inner:
            say(EVIL, "to standard output")
            inner.advance(2, loss=1)
            say("to standard error", error=True)
            put("a\tb\n")
            lines = [SHOWN, "to standard output", "to standard error", "a\tb"]
            inner_bar = f"{SHOWN} 2/8 rows, 0 s left, loss 1 |##5"
            assert terminal.screen() == [*lines, bar, inner_bar]
        assert terminal.screen() == [*lines, bar]
        outer.advance(2)
    say("after")
    *above, last, after = terminal.screen()
    assert (above, after) == (lines, "after")
    assert last == "training 4/4 steps, 0 s left, loss 7.123, tokens/s 12,346 |##########"


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (120, ", 31:00 h left, loss 7.123, tokens/s 123,457, lr 9.876e-05 |"),
        (80, ", 31:00 h left, loss 7.123, tokens/s 123,457 |"),
        (61, ", 31:00 h left, loss 7.123 |"),
        (30, " |"),
    ],
)
def test_a_narrow_terminal_shows_what_matters(
    columns: int, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A line that is longer than the terminal would break at its right edge."""
    now = 100.0
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    with Progress("training", 1_000_000, "steps", 120_000, lines=False) as progress:
        progress.bar.dynamic_ncols = lambda _: (columns, 24)
        now += 3600
        progress.advance(27_500, **{"loss": 7.12345, "tokens/s": 123456.6, "lr": 9.8765e-5})
        line = str(progress.bar)
    assert len(line) <= columns
    assert line.startswith(("training 147,500/1,000,000 steps" + shown)[:columns])


def test_a_log_has_lines_with_the_same(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 100.0
    monkeypatch.setattr(display.time, "monotonic", lambda: now)
    with Progress(EVIL, 2e6, "rows", 1e6) as progress, Progress("", 0, "B") as unknown:
        for _ in range(5):
            now += 4
            progress.advance(1000, loss=7.12345)
            unknown.advance(1e7)
    first = f"{SHOWN}: 50%, 1,003,000 of 2,000,000 rows, 1:06 h left, loss 7.123"
    assert capsys.readouterr().err.splitlines() == [first, ": 30.0 MB, 2.5 MB/s"]


def test_short_work_and_other_ranks_are_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Progress("short", 10, "rows") as progress:
        progress.advance(10)
    monkeypatch.setattr(display, "EVERY", 0)
    for options in ({"active": False}, {"lines": False}):
        with Progress("silent", 10, "rows", **options) as progress:
            progress.advance(5)
        assert progress.state().startswith("50%, 5 of 10 rows, 0 s left")
    assert capsys.readouterr() == ("", "")


def test_durations() -> None:
    assert [duration(s) for s in (0.4, 89, 90, 3599, 3600, 7384)] == [
        "0 s",
        "89 s",
        "1.5 min",
        "60.0 min",
        "1:00 h",
        "2:03 h",
    ]
