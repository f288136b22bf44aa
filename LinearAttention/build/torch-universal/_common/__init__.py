"""What several kernel repositories share: each has this folder in its package, as ``_common``."""
