"""Edits that change a site in a forward pass, the metrics of a run, and the effects of edits."""
