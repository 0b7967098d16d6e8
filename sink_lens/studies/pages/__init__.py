"""The pages of its kinds of run: each draws a run folder with the frame in ``sink_lens.report``; none needs torch."""
