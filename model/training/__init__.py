"""The training loop around the model: configuration, data, step, optimizer, checkpoints, logs."""
