"""Several hosts on one machine, with links of a chosen rate."""
