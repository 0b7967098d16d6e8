"""Training a model, watching what its checkpoints become, and comparing variants."""
