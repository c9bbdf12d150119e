"""The steps from an empty database to this release."""
