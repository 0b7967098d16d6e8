"""The pages of its kinds of run; none needs torch."""
