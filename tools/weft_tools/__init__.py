"""What plans capacity and measures with weft: the distribution torch-weft-tools, whose commands
``weft bench``, ``weft report`` and ``weft show`` are in `cli`.
"""
