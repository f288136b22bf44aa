"""Generate parts of the documents."""


class DocumentError(ValueError):
    """Say why the documents cannot be written: what is wrong, and what to do."""
