"""Circuits: the edges between heads and MLPs that carry what a metric measures, with scores and real patches."""
