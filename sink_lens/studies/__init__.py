"""One question, one run folder: isolate, amplify, ablate."""
