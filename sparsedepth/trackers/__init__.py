"""Finished runs in other people's trackers: TensorBoard, MLflow, Trackio, Weights & Biases."""
