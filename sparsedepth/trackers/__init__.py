"""Runs in other people's trackers, sent and read: TensorBoard, MLflow, Trackio, Weights & Biases."""
