"""Models in and out of the workbench: transformers, lm-evaluation-harness, and depth scaling on a foreign model."""
