"""The causal chain from value aggregation to the sink: finders, links and the trace."""
