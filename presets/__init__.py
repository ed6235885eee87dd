"""The presets: TOML files read by `ptxtrain.engine.config`."""
