"""Edits of a forward pass on the bridge, and what they do to a sink: isolate, amplify, ablate, patch."""
