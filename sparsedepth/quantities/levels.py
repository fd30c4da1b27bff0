"""The error rates of every verdict: its level, and the power with which a detectable effect is seen."""

ALPHA = 0.05
POWER = 0.8
