"""Training on one device as n workers would, for studies of accuracy."""
