"""The table of the chain: why a link has no interval."""

from support.runs_frame import grid

from sparsedepth.effects.summary import chain_lines


def one_line(text):
    return " ".join(text.split())


def test_the_chain_says_why_it_has_no_interval():
    runs = grid(
        {"depth_scale": ["none", "lns"], "n_layers": [4, 12], "seed": [0, 1]},
        lambda config: {"val_loss": 3.0 - config.n_layers / 100, "usefulness": config.n_layers / 24 + config.seed},
    )
    (table,) = chain_lines(runs)
    assert "of 2 combinations of settings" in one_line(table)
    assert "no interval: 2 combinations of settings, 6 are needed" in one_line(table)
    rows = [line.split() for line in table.splitlines() if line.startswith("usefulness ")]
    assert [row[-3:] for row in rows] == [["none", "too", "few"]] and "'too few' no interval" in one_line(table)
    assert "lo" not in table.split("verdict\n")[0].splitlines()[-1].split()
