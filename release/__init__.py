"""What a release must be before it is one: `make release-check`."""
