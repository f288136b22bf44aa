"""What of the documents is generated."""


class DocumentError(ValueError):
    """The documents cannot be written: what is wrong, and what to do."""
