"""An edit changes a site of a forward pass: the constructors, the metrics that judge a run, and what an edit did."""
