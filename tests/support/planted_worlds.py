"""Planted worlds: runs of one depth whose truth is known, and what the engine says of them.

Losses are parabolas in steps of lr (`bend` nat a step, squared), a roughness of each value, and seeds. Tuning seeds
choose, fresh seeds are the results. Setting 0 is the baseline; setting 1 has the effect.
"""

from dataclasses import dataclass, field

import numpy as np

from sparsedepth.effects.fit import fit
from sparsedepth.effects.verdict import Side, adjusted, verdict_of

NORMAL, HEAVY = "normal", "heavy"


@dataclass(frozen=True, kw_only=True)
class World:
    sd: float = 1.0
    settings: int = 3
    seeds: int = 5
    effect: float = 0.0
    tuning_seeds: int = 0
    """0: untuned."""
    n_lr: int = 5
    rough: float = 0.0
    bend: float = 0.01
    spread: float = 0.5
    """Optima lie this many steps about the middle, uniform."""
    bends: dict[int, float] = field(default_factory=dict)
    """Setting -> factor of its bend."""
    right: float = 1.0
    """How much steeper a curve is above its optimum."""
    beyond: float = 0.0
    """Nat that the baseline loses at the end of its grid."""
    noisier: dict[int, float] = field(default_factory=dict)
    """Setting -> factor of its noise."""
    shift: float = 0.0
    """Sd by which a seed moves all runs of the depth, in units of sd."""
    knob_share: float = 0.0
    """Share of the variance with which a seed moves all runs of a setting; every setting is run in two contexts."""
    tails: str = NORMAL
    values: tuple[float, ...] = ()
    """True values of the cells, of a world whose contrasts are `pairs`."""
    pairs: tuple[tuple[int, int], ...] = ()


def draw(world: World, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray, list[str]]:
    """The runs, the true value of each cell, and which end of its grid each chosen lr is ('' for none)."""
    n_cells = (world.settings + 1) * (2 if world.knob_share else 1)
    value_C = np.array(world.values) if world.values else np.eye(n_cells)[1] * world.effect
    noise = rng.standard_normal if world.tails == NORMAL else lambda n: rng.standard_t(3, n) / np.sqrt(3)
    shift_S = world.shift * world.sd * rng.standard_normal(world.tuning_seeds + world.seeds)
    knob_S = np.sqrt(world.knob_share) * rng.standard_normal((world.settings + 1, world.tuning_seeds + world.seeds))
    parts, ends = [], []
    for c in range(n_cells):
        sd = world.sd * world.noisier.get(c, 1.0)

        def losses(level: float, seeds: slice, c: int = c, sd: float = sd) -> np.ndarray:
            own = np.sqrt(1 - world.knob_share) * noise(len(shift_S)) + knob_S[c % (world.settings + 1)]
            return (level + shift_S + sd * own)[seeds]

        results = slice(world.tuning_seeds, None)
        if not world.tuning_seeds:
            parts.append((c, 0.0, False, losses(value_C[c], results)))
            ends.append("")
            continue
        u_K = np.arange(world.n_lr) - (world.n_lr - 1) / 2
        best = rng.uniform(-world.spread, world.spread)
        if world.beyond and c == 0:
            best = u_K[-1] + np.sqrt(world.beyond / world.bend)
        bend = world.bend * world.bends.get(c, 1.0)
        level_K = (
            value_C[c]
            + bend * (u_K - best) ** 2 * np.where(u_K > best, world.right, 1.0)
            + world.rough * rng.standard_normal(world.n_lr)
        )
        tuning_KS = np.array([losses(level, slice(world.tuning_seeds)) for level in level_K])
        k = int(tuning_KS.mean(axis=1).argmin())
        ends.append({0: "lowest", world.n_lr - 1: "highest"}.get(k, ""))
        parts += [(c, u_K[i] - u_K[k], True, tuning_KS[i]) for i in range(world.n_lr)]
        parts.append((c, 0.0, False, losses(level_K[k], results)))
    n_P = [len(losses) for *_, losses in parts]
    runs = dict(
        cell_N=np.repeat([c for c, *_ in parts], n_P),
        u_N=np.repeat([u for _, u, *_ in parts], n_P),
        is_tuning_N=np.repeat([is_tuning for _, _, is_tuning, _ in parts], n_P),
        seed_N=np.concatenate([np.arange(n) for n in n_P]),
        y_N=np.concatenate([losses for *_, losses in parts]),
    )
    return runs, value_C, ends


def judge(world: World, rng: np.random.Generator) -> list[tuple[bool, str, float, float]]:
    """(covered, verdict, truth, half-width) of every setting against the baseline."""
    runs, value_C, ends = draw(world, rng)
    found = fit(**runs)
    assert found is not None
    others = [c for c in range(1, len(value_C)) if not world.knob_share or c != world.settings + 1]
    pairs = world.pairs or tuple((c, 0) for c in others)
    unit_CC = np.eye(len(value_C))
    contrasts = [found.combine(unit_CC[c] - unit_CC[b]) for c, b in pairs]
    shared = [found.share_of_baseline(c, b) for c, b in pairs]
    p_J = adjusted(np.array([each.p for each in contrasts]), np.array(shared))
    judged = []
    for (c, b), contrast, p in zip(pairs, contrasts, p_J, strict=True):
        sides = [Side(name=str(i), edge=ends[i], outside=float(found.values.outside_C[i])) for i in (c, b)]
        low, high = contrast.quantiles([0.025, 0.975])
        truth = float(value_C[c] - value_C[b])
        verdict = verdict_of(contrast.estimate, float(p), (sides[0], sides[1]))[0]
        judged.append((low <= truth <= high, verdict, truth, (high - low) / 2))
    return judged


@dataclass(frozen=True, kw_only=True)
class Score:
    covered: float
    """Of all contrasts."""
    worst: float
    """Of the worst contrast."""
    false: float
    """Depths with any wrong verdict."""
    found: float
    half_width: float


def _right(truth: float) -> str:
    return "lower" if truth < 0 else "higher" if truth > 0 else "not shown"


def score(world: World, n: int, seed: int = 0) -> Score:
    draws = [judge(world, np.random.default_rng([seed, i])) for i in range(n)]
    covered = np.array([[one[0] for one in family] for family in draws])
    wrong = [any(verdict not in {"not shown", _right(truth)} for _, verdict, truth, _ in family) for family in draws]
    found = [family[0][1] == _right(family[0][2]) != "not shown" for family in draws]
    return Score(
        covered=float(covered.mean()),
        worst=float(covered.mean(axis=0).min()),
        false=float(np.mean(wrong)),
        found=float(np.mean(found)),
        half_width=float(np.mean([half for family in draws for *_, half in family])),
    )


_TEXT = {4: (0.05, 0.04), 12: (0.02, 0.01), 24: (0.01, 0.005)}
_RISING = {4: (0.01, 0.005), 12: (0.02, 0.02), 24: (0.05, 0.04)}


def _tuned(sd: float, rough: float, **more) -> World:
    return World(**{"sd": sd, "rough": rough, "tuning_seeds": 2, **more})


WORLDS: dict[str, World] = {
    **{f"text, {depth} layers, .05": _tuned(*of, effect=-0.05) for depth, of in _TEXT.items()},
    "text, 24 layers, .03": _tuned(*_TEXT[24], effect=-0.03),
    **{f"noise rising, {depth} layers": _tuned(*of) for depth, of in _RISING.items()},
    "seed shifts all, 4 x 3, 2.5 sd": World(settings=4, seeds=3, effect=-2.5, shift=2),
    "seed shifts all, 3 x 6, 2.5 sd": World(settings=3, seeds=6, effect=-2.5, shift=2),
    "plain, 4 x 3, 4 sd": World(settings=4, seeds=3, effect=-4.0),
    "plain, 3 x 6, 2 sd": World(settings=3, seeds=6, effect=-2.0),
    "untuned text, 3 x 3, .02": World(sd=0.01, seeds=3, effect=-0.02),
    "untuned text, 3 x 3, .05": World(sd=0.01, seeds=3, effect=-0.05),
    "seed shifts a setting, 4 x 3": World(settings=4, seeds=3, knob_share=0.5),
    "untuned, baseline 3 x noisier, 4 x 3": World(settings=4, seeds=3, noisier={0: 3}),
    "untuned, baseline 3 x noisier, 3 x 3": World(settings=3, seeds=3, noisier={0: 3}),
    "untuned, one setting 3 x noisier, 4 x 3": World(settings=4, seeds=3, noisier={2: 3}),
    "tuned, baseline 3 x noisier, .05": _tuned(*_TEXT[24], effect=-0.05, noisier={0: 3}),
    "tuned, one setting 3 x noisier, .05": _tuned(*_TEXT[24], effect=-0.05, noisier={2: 3}),
    "curve of baseline 2 x as sharp, .03": _tuned(*_TEXT[24], effect=-0.03, bends={0: 2}),
    "curve of baseline 3 x as sharp": _tuned(*_TEXT[24], bends={0: 3}),
    "curve of baseline 3 x as sharp, .03": _tuned(*_TEXT[24], effect=-0.03, bends={0: 3}),
    "curve of one setting 3 x as sharp": _tuned(*_TEXT[24], bends={2: 3}),
    **{f"right side {n} x as steep, .03": _tuned(*_TEXT[24], effect=-0.03, right=n) for n in (4, 8)},
    "heavy tails, .03": _tuned(*_TEXT[24], effect=-0.03, tails=HEAVY),
    "heavy tails, untuned, 4 x 3": World(settings=4, seeds=3, tails=HEAVY),
    **{f"baseline .{at:02} beyond": _tuned(*_TEXT[24], beyond=at / 100) for at in (4, 8, 12)},
    **{f"baseline .{at:02} beyond, hidden": _tuned(*_TEXT[4], beyond=at / 100) for at in (4, 8, 12)},
    "depth study, 12 layers, .3": _tuned(0.1, 0.02, settings=4, seeds=10, tuning_seeds=3, effect=-0.3, bend=0.07),
    "depth study, 32 layers, .3": _tuned(0.16, 0.03, settings=4, seeds=10, tuning_seeds=3, effect=-0.3, bend=0.07),
    "LNS -.3 alone, +.2 beside": _tuned(
        0.1, 0.02, settings=3, seeds=10, tuning_seeds=3, bend=0.07, values=(0, -0.3, 0, 0.2), pairs=((1, 0), (3, 2))
    ),
    "1 tuning seed, .05": _tuned(*_TEXT[24], effect=-0.05, tuning_seeds=1),
    "8 settings, .05": _tuned(*_TEXT[24], effect=-0.05, settings=8),
    "1 setting, .05": _tuned(*_TEXT[24], effect=-0.05, settings=1),
}


def table(n: int) -> str:
    """The table of judges, as markdown."""
    lines = ["| world | covered | worst | false | found | half-width |", "|---|---|---|---|---|---|"]
    for name, world in WORLDS.items():
        of = score(world, n)
        found = f"{of.found:.2f}" if world.effect or world.values else ""
        lines.append(f"| {name} | {of.covered:.3f} | {of.worst:.3f} | {of.false:.3f} | {found} | {of.half_width:.3g} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    table(int(sys.argv[1]))
