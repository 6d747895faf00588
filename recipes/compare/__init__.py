"""Runs one recipe with several strategies, densities and seeds; tables, a CSV and pictures of what they came to."""
