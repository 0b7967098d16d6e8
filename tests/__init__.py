"""Tests, and the tiny and planted models that they, the analyses, benchmarks and tools share."""
