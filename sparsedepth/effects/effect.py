"""A row of the frame `effects` as a record."""

from sparsedepth.config.section import Section


class Effect(Section):
    """A row of the frame as a record, for cards and other JSON. NULL (None) is what the runs do not tell."""

    question: str
    """setting, beside, interaction, depth or depth slope"""
    setting: str
    context: str = ""
    """the setting beside which it was run; empty: the baseline"""
    n_layers: int | None
    basis: str | None
    """the cost that both sides share, or 'none'"""
    at: str | None
    """'own lr', 'equal lr', 'carried lr', or the value at which both sides were run"""
    estimate: float | None
    lo: float | None
    hi: float | None
    df: float | None = None
    """degrees of freedom of the interval"""
    p: float | None = None
    """of this effect alone"""
    p_adjusted: float | None
    """over the settings of the depth"""
    detectable: float | None
    """the effect that would have been seen with 80% power"""
    verdict: str
    """lower, higher, not shown, lr decides or not known"""
    reason: str
    """why a verdict was withheld; empty where none was"""
    fitted: float | None = None
    """the value whose difference estimate is; ln of a ratio"""
    fitted_baseline: float | None = None
    estimate_own_lr: float | None = None
    """each side at its own lr, where estimate is not"""
    lo_own_lr: float | None = None
    hi_own_lr: float | None = None
    seeds_part: float | None = None
    """of half the interval: seeds; the squares of both parts add up"""
    lr_part: float | None = None
    """of half the interval: choosing lr"""
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
    baseline_value: float | None = None
    """the plain mean of its results"""
    without: str | None = None
    """the seed or folder that decides or moves it (second look)"""
    estimate_without: float | None = None
    verdict_without: str | None = None
    later: int | None = None
    """runs that were started after a look at it was possible"""
    outcome: str
    unit: str
    """of the difference; 'ln ratio': of natural logarithms"""

    @property
    def is_shown(self) -> bool:
        return self.verdict in ("lower", "higher")
