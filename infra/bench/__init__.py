"""Benchmarks of the product's own processes, beside what a user would pick instead (docs/benchmarks.md)."""
