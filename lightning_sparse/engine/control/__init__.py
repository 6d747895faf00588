"""Setting λ: calibration to a density, and its correction afterwards."""
