"""Checks a release before publication: `make release-check`."""
