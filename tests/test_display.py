"""Lines, data and progress: whole and escaped, above the bars of a terminal, the same in a log."""

from __future__ import annotations

import io
import re

import pytest

from xformer.data import display
from xformer.data.display import Progress, duration, put, say

EVIL = "\x1b[31m{x}\r"
SHOWN = r"\x1b[31m{x}\r"


class Terminal(io.StringIO):
    """Both standard streams of a command that runs on a terminal."""

    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """What stands on it now, without empty lines."""
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
    """Two bars at once, as when a run validates; the inner one goes, the outer one stays."""
    terminal = Terminal()
    monkeypatch.setattr("sys.stdout", terminal)
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setattr(display, "REDRAW", 0)
    monkeypatch.setattr(display.time, "monotonic", lambda: 100.0)
    with Progress("training", 4, "steps", 1, lines=False, stay=True) as outer:
        assert terminal.screen() == ["##5       | training: 25%, 1 of 4 steps"]
        outer.advance(1, **{"loss": 7.12345, "tokens/s": 12345.6})
        said = "| training: 50%, 2 of 4 steps, 0 s left, loss 7.123, tokens/s 12,346"
        assert terminal.screen() == [f"#####     {said}"]
        with Progress(EVIL, 8, "rows") as inner:
            say(EVIL, "to standard output")
            inner.advance(2, loss=1)
            say("to standard error", error=True)
            put("a\tb\n")
            lines = [SHOWN, "to standard output", "to standard error", "a\tb"]
            bars = [f"#####     {said}", f"##5       | {SHOWN}: 25%, 2 of 8 rows, 0 s left, loss 1"]
            assert terminal.screen() == [*lines, *bars]
        assert terminal.screen() == [*lines, bars[0]]
        outer.advance(2)
    say("after")
    *above, bar, after = terminal.screen()
    assert (above, after) == (lines, "after")
    assert bar.startswith("##########| training: 100%, 4 of 4 steps, 0 s left, loss 7.123")


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
