"""Reading a model: tensors kept (capture) or reduced on the fly (stream), and attention mass without the pattern."""
