"""A row of the frame `effects` as a record."""

from typing import Annotated

from pydantic import Field

from sparsedepth.config.section import Section


class Effect(Section):
    """A row of the frame as a record, for cards and other JSON. NULL (None) is what the runs do not tell."""

    question: Annotated[str, Field(description="setting, beside, interaction, depth or depth slope")]
    setting: str
    context: Annotated[str, Field(description="the setting beside which it was run; empty: the baseline")] = ""
    n_layers: int | None
    basis: Annotated[str | None, Field(description="the cost that both sides share, or 'none'")]
    at: Annotated[
        str | None, Field(description="'own lr', 'equal lr', 'carried lr', or the value at which both sides were run")
    ]
    estimate: float | None
    lo: float | None
    hi: float | None
    df: Annotated[float | None, Field(description="degrees of freedom of the interval")] = None
    p: Annotated[float | None, Field(description="of this effect alone")] = None
    p_adjusted: Annotated[float | None, Field(description="over the settings of the depth")]
    detectable: Annotated[float | None, Field(description="the effect that would have been seen with 80% power")]
    verdict: Annotated[str, Field(description="lower, higher, not shown, lr decides or not known")]
    reason: Annotated[str, Field(description="why a verdict was withheld; empty where none was")]
    fitted: Annotated[float | None, Field(description="the value whose difference estimate is; ln of a ratio")] = None
    fitted_baseline: float | None = None
    estimate_own_lr: Annotated[float | None, Field(description="each side at its own lr, where estimate is not")] = None
    lo_own_lr: float | None = None
    hi_own_lr: float | None = None
    seeds_part: Annotated[
        float | None, Field(description="of half the interval: seeds; the squares of both parts add up")
    ] = None
    lr_part: Annotated[float | None, Field(description="of half the interval: choosing lr")] = None
    lr: float | None
    lr_baseline: float | None
    seeds: int | None
    seeds_baseline: int | None = None
    diverged: int | None
    diverged_baseline: int | None
    tokens: float | None = None
    flops: float | None = None
    params_total: float | None = None
    params_active: float | None = None
    time: float | None = None
    baseline_value: Annotated[float | None, Field(description="the plain mean of its results")] = None
    without: Annotated[str | None, Field(description="the seed or folder that decides or moves it (second look)")] = (
        None
    )
    estimate_without: float | None = None
    verdict_without: str | None = None
    later: Annotated[int | None, Field(description="runs that were started after a look at it was possible")] = None
    outcome: str
    unit: Annotated[str, Field(description="of the difference; 'ln ratio': of natural logarithms")]

    @property
    def is_shown(self) -> bool:
        return self.verdict in ("lower", "higher")
