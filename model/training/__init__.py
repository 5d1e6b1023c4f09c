"""The training loop: configuration, data, step, optimizer, checkpoints, logs."""
