"""Read activations: keep tensors (capture), reduce them on the fly (stream), or get attention without the pattern."""
