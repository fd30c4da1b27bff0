"""From a config and batches to trained weights and curves, exactly resumable."""
