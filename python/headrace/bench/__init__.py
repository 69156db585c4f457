"""Benchmarks: real token counts, real paths, and a check that the tokens are right."""
