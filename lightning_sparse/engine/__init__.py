"""One step of sparse averaging, and the state that a worker keeps between steps."""
