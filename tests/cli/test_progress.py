"""The progress of a run where there is no terminal."""

import time

from sparsedepth.cli.run_progress import bar


def test_without_a_terminal_a_run_says_at_the_start_and_every_half_minute_how_long_is_left(monkeypatch, capsys):
    """A resumed run, at 50% from its first step: 1% in 10 s, so the 46% that are left at 54% take 7m40s."""
    seconds = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: seconds)
    with bar("run") as report:
        report("reading the text", 0.0)
        for step in range(5):
            report("training", 0.5 + 0.01 * step, 1.25)
            seconds += 10.0
            if step == 2:
                assert capsys.readouterr().err == "run: reading the text, 0% done\n"
        seconds += 1.0
        report("training", 0.55, 1.25)
    first, *others = capsys.readouterr().err.splitlines()
    assert first == "run: training, loss 1.250, 54% done, about 7m40s left" and not others
