"""Release the package: two files from a clean tree, each tried in an empty environment away from it."""


class ReleaseError(Exception):
    """Say why there is no release, and what to do."""
