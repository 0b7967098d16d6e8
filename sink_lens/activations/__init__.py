"""Read activations: keep tensors (capture), reduce them as they come (stream), or get attention without the pattern."""
