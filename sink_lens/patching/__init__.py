"""Activation, path and attribution patching: put activations of one run into another run."""
