"""Runs a recipe with several strategies, densities and seeds; writes tables, a CSV and pictures."""
