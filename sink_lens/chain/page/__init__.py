"""The page of a trace: its words, figures, tables and circuit, from the run folder alone; none needs torch."""
