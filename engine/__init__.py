"""Config, model, trainer, checkpoints, and the devices they run on."""
