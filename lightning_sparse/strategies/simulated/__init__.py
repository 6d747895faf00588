"""Simulates n workers on one device, for studies of accuracy."""
