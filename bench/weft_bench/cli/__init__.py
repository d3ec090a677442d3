"""The commands ``weft bench``, ``weft report`` and ``weft show``."""
