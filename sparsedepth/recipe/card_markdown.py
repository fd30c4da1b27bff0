"""A recipe card as Markdown: the thirteen fields in order, for readers."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import yaml

from sparsedepth.files import write_text
from sparsedepth.recipe.card import SUFFIX, Card, config_of, write_card
from sparsedepth.recipe.literature import lines as compared

MEANING = {
    "A": "held-out confirmed, with an intervention",
    "B": "held-out confirmed",
    "C": "in-sample, several seeds",
    "D": "single runs",
}


def markdown(card: Card) -> str:
    """The card as one page."""
    sections = [
        ("1. Rule", _rule(card)),
        ("2. Domain", _domain(card)),
        ("3. Effects", _effects(card)),
        ("4. What was matched", _matched(card)),
        ("5. Learning rate", _list(card.learning_rate)),
        ("6. Mechanism", _mechanism(card)),
        ("7. Confounds", _list(card.confounds)),
        ("8. Held-out test", _held_out(card)),
        ("9. Interactions", _interactions(card)),
        ("10. Negative and null results", _list(card.negative)),
        ("11. Literature", _list(compared(card.literature))),
        ("12. Provenance", _provenance(card)),
        ("13. Grade", f"**{card.grade.letter}**: {MEANING[card.grade.letter]}. {_plain(card.grade.why)}."),
    ]
    body = "\n\n".join(f"## {title}\n\n{text}" for title, text in sections)
    return f"# Recipe card: grade {card.grade.letter}, version {card.version}\n\n{body}\n"


def write_page(path: Path, card: Card) -> tuple[Path, Path]:
    """Write the card's JSON and Markdown beside `path`; returns where."""
    data = write_card(path, card)
    page = data.with_name(data.name.removesuffix(SUFFIX) + ".card.md")
    write_text(page, markdown(card))
    return data, page


def _rule(card: Card) -> str:
    gain = "unknown" if card.rule.expected_gain is None else f"{card.rule.expected_gain!r} {card.rule.unit}"
    config = "none"
    if card.rule.config is not None:
        away = config_of(card.rule.config).model_dump(mode="json", exclude_defaults=True, exclude={"seed"})
        text = yaml.safe_dump({"n_layers": card.rule.depth, **away}, sort_keys=False).rstrip()
        config = f"what differs from RunConfig's defaults\n\n```yaml\n{text}\n```"
    return "\n\n".join(
        (
            f"**{_plain(card.rule.sentence)}**",
            f"Expected gain (sum of the shrunk effects, as if they added up): {gain}. "
            f"Shrinkage: {card.rule.shrinkage}.",
            f"Configuration: {config}",
        )
    )


def _domain(card: Card) -> str:
    outside = {"inside": "", "interpolation": " **Interpolation**: this depth was not run."}
    note = outside.get(card.domain.place, " **Extrapolation**: this depth lies outside those that were run.")
    depths = ", ".join(map(str, card.domain.depths)) or "none"
    head = (
        f"n_layers={card.rule.depth}; evidence from n_layers {depths}.{note} Outside these values all is extrapolation:"
    )
    return f"{head}\n\n{_list(f'{name}: {value}' for name, value in card.domain.values.items())}"


def _effects(card: Card) -> str:
    columns = ("setting", "vs", card.rule.objective, "95% interval", "shrunk", "pairs", "seeds", "floor", "Holm p", "")
    rows = [
        (
            one.setting,
            one.baseline,
            _number(one.mean),
            _interval(one.lo, one.hi),
            _number(one.shrunk),
            str(one.n_pairs),
            str(one.n_seeds),
            _number(one.floor, ""),
            _number(one.p_holm, ""),
            "recommended" if one.recommended else one.reason,
        )
        for one in card.effects
    ]
    unit = f"In {card.rule.unit}; floor: the smallest difference that seeds do not explain."
    return f"{_table(columns, rows)}\n\n{unit}" if rows else "none"


def _matched(card: Card) -> str:
    bases = list(card.matched[0].equal) if card.matched else []
    columns = ("setting", *(f"at equal {basis}" for basis in bases), *(f"{b} ratio" for b in bases), "wall-clock ratio")
    rows = []
    for one in card.matched:
        equal = []
        for basis in bases:
            found = one.equal[basis]
            equal.append("no pair" if not found else f"{_number(found['mean'])} {_interval(found['lo'], found['hi'])}")
        ratios = ["unknown" if not ratio else " to ".join(dict.fromkeys(f"{r:.3g}" for r in ratio)) for ratio in
                  (one.ratios.get(basis) for basis in bases)]  # fmt: skip
        rows.append((one.setting, *equal, *ratios, _number(one.wall_clock, "")))
    note = "Wall-clock is shown as a ratio, not held equal: it depends on the machine."
    return f"Rule: a setting may spend no more {card.rule.matched} than its baseline.\n\n" + (
        f"{_table(columns, rows)}\n\n{note}" if rows else "none"
    )


def _mechanism(card: Card) -> str:
    by_link: dict[str, list[str]] = {}
    for one in card.mechanism.links:
        if one["scope"].startswith("within ") and not one["scope"].startswith("within depth"):
            continue  # a handful of configurations each: the card's data has them
        found = f"{one['scope']} {one['rho']:+.2f} {_interval(one['lo'], one['hi'])}"
        by_link.setdefault(f"{one['cause']} -> {one['effect']}: **{one['word']}**", []).append(found)
    links = [f"{link}; rho {', '.join(found)}" for link, found in by_link.items()]
    moves = [
        f"intervention {one.setting}: {one.link} {one.moves_link}; {card.rule.objective} {one.moves_objective}"
        for one in card.mechanism.interventions
    ]
    return f"Earned word: **{card.mechanism.word}** ({_plain(card.mechanism.why)}).\n\n{_list([*links, *moves])}"


def _held_out(card: Card) -> str:
    lines = list(card.held_out.depth_sentences)
    trial = card.held_out.verification
    if trial:
        seeds = ", ".join(map(str, trial.seeds))
        lines.append(f"Trial on fresh seeds {seeds}: {trial.outcome}; recipe less baseline: {trial.gain_text}")
    return _list(lines) if lines else "No held-out test was made."


def _interactions(card: Card) -> str:
    left = [f"without {one.left_out}: {one.verdict}: {one.gain}" for one in card.interactions.leave_one_out]
    return _list([f"Together: {card.interactions.stack}", *left, *card.interactions.with_depth])


def _provenance(card: Card) -> str:
    found = card.provenance
    trial = card.held_out.verification
    hours = ", ".join(f"{value:.3g} h on {name}" for name, value in found.hours.items()) or "unknown"
    return _list(
        [
            f"Runs: {' '.join(found.run_ids) or 'none'}",
            *([f"Runs of the trial: {' '.join(trial.run_ids)}"] if trial else []),
            f"Seeds: {', '.join(map(str, found.seeds)) or 'none'}",
            f"Manifests: {found.manifests or 'not all present'}",
            *(f"{name}: {', '.join(values)}" for name, values in
              (("Code", found.code), ("Kernels", found.kernels), ("Data", found.data)) if values),
            f"Cost: {hours}",
            f"This card: {found.command}",
            f"Its figures: {found.figures}",
        ]
    )  # fmt: skip


def _plain(text: str) -> str:
    """One line, whatever a corpus or a setting is called; nothing in it is markup."""
    return " ".join(text.split()).replace("<", "&lt;").replace("`", "'")


def _list(lines: Iterable[str]) -> str:
    return "\n".join(f"- {_plain(line)}" for line in lines) or "none"


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(_plain(cell).replace('|', '/') for cell in cells)} |"

    return "\n".join([line(columns), line(["---"] * len(columns)), *map(line, rows)])


def _number(value: float | None, sign: str = "+") -> str:
    return "unknown" if value is None else f"{value:{sign}.3g}"


def _interval(lo: float | None, hi: float | None) -> str:
    return "no interval" if lo is None or hi is None else f"({lo:+.3g} to {hi:+.3g})"
