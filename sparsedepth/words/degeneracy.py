"""Why scores of depth are no evidence (`store.degeneracy`)."""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from sparsedepth.words.plain_text import commas

if TYPE_CHECKING:
    from sparsedepth.store.degeneracy import CommonWeakness, Degeneracy, LayerMetrics, Reason, UsableForm, Weakness

_REASONS = {
    "bigram": "the model is worse than a bigram table of the text",
    "chance": "the model is at chance",
    "overfit": "the model overfits its training text",
    "loss": "it is relative to a loss below {value:g} nat/token",
    "block": "one block carries more than half of it",
    "start": "its interval contains 0, the value at initialisation",
    "zero": "it is 0, the value at initialisation",
    "constant": "{value:g} in every run",
}
_UNKNOWN = {
    "bigram": "unknown whether the model beats a bigram table: no bigram_loss",
    "rows": "unknown which block carries it: no values by block",
    "weight": "no block carries it: none has a weight above 0",
}


def reason_text(reason: "Reason") -> str:
    place = "" if reason.n_layers is None else f" at {reason.n_layers:g} layers"
    return _REASONS[reason.kind].format(value=reason.value) + place


def main_reason(judged: "Degeneracy") -> str:
    """Empty without one."""
    return next(map(reason_text, judged.reasons), "")


def grounds(judged: "Degeneracy") -> str:
    """All reasons with the number of runs, then what is unknown; empty where it is degenerate in no run."""
    reasons = [f"{reason_text(reason)} ({n} of {judged.n_runs} runs)" for reason, n in judged.reasons.items()]
    return "; ".join([*reasons, *map(_UNKNOWN.__getitem__, judged.unknown)]) if reasons else ""


def degeneracy_text(judged: "Degeneracy") -> str:
    """'usefulness is degenerate: 0 in every run (9 of 9 runs); ...', or what is unknown; empty if all is well."""
    if why := grounds(judged):
        return f"{judged.score} is degenerate{'' if judged.is_degenerate else ' in some runs'}: {why}"
    return f"{judged.score}: {'; '.join(map(_UNKNOWN.__getitem__, judged.unknown))}" if judged.unknown else ""


def in_some_runs(scores: Mapping[str, Iterable[str]]) -> str:
    """Scores that are degenerate in some runs only, by their grounds."""
    parts = [f"{commas(of)}, because {why}" for why, of in scores.items()]
    return f"Degenerate in some runs: {'; '.join(parts)}"


def caution(usable: "UsableForm", advice: str = "use") -> str:
    """What is wrong with a score, and which form to use; empty where all is well."""
    text = degeneracy_text(usable.judged)
    if not usable.judged.is_degenerate:
        return text
    is_replaced = usable.form != usable.judged.score
    return f"{text}; {f'{advice} {usable.form}' if is_replaced else 'no other form of it is sound in these runs'}"


def weakness_text(found: "CommonWeakness | None") -> str:
    """The weakness of most finished runs, with their loss and that of the table or chance; empty without one."""
    if found is None:
        return ""
    return (
        f"{_REASONS[found.kind]} ({found.n_alike} of {found.n_finished} runs; val_loss {found.loss:.4g} against "
        f"{'a train_loss of ' * (found.kind == 'overfit')}{found.other:.4g} nat/token)"
    )


def stronger(kind: "Weakness", train_tokens: int) -> str:
    """What makes a weak model evidence about depth."""
    ways = {
        "chance": f"train longer, for example {train_tokens:,} tokens, or with another lr",
        "overfit": "use more text, or fewer train_tokens",
    }
    return ways.get(kind, f"train longer: about {train_tokens:,} tokens")


def notes_on_run(reasons: "Mapping[Reason, list[str]]") -> list[str]:
    """Why scores of a finished run are degenerate; the reason of a weak model concerns all."""
    weak = [reason for reason in reasons if reason.kind in ("bigram", "chance", "overfit")]
    others = {reason_text(reason): of for reason, of in reasons.items() if reason not in weak}
    return [
        *(f"{reason_text(reason)}, so no score of depth is evidence" for reason in weak),
        *(f"degenerate ({why}): {commas(of)}" for why, of in others.items()),
    ]


def degeneracy_caption(forms: "Iterable[UsableForm]") -> str:
    """A sentence for a caption: degenerate scores, their main reasons, and what is drawn instead."""
    text = ""
    marked = []
    for form, judged in forms:
        named = f"{judged.score} ({main_reason(judged)})"
        if judged.is_degenerate and form != judged.score:
            text += f" Drawn in place of {named}, which is degenerate: {form}."
        elif judged.is_degenerate:
            marked.append(named)
    return text + (f" Degenerate, so no evidence: {commas(marked)}." if marked else "")


def layer_metrics_caption(found: "LayerMetrics", small_loss: float) -> str:
    """Which metrics by layer stand for others that are divided by a small loss, and which are no evidence."""
    why = _REASONS["loss"].format(value=small_loss)
    replaced = [(name, form) for name, form in found.drawn.items() if form != name]
    text = "".join(f" Drawn in place of {name} ({why}): {form}." for name, form in replaced)
    return text + (f" No evidence ({why}): {commas(found.unsound)}." if found.unsound else "")
