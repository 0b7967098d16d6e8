"""Plain functions of one layer's tensors, one module a link of the chain; `table.py` lists them all.

No model and no hooks: tensors in, tensors out, on whatever device they are. All arithmetic is in float32 or
better even where the inputs are half precision, because the norm of a sink token overflows float16. A result
that is not defined is `nan`, never 0.
"""
