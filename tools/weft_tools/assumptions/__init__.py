"""The device engine's assumptions about a GPU, as the questions of ``weft doctor --gpu``."""
