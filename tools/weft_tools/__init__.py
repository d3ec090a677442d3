"""What measures weft, predicts its times, tests its proof, asks a GPU about its assumptions, and
converts plans: the distribution torch-weft-tools. `cli` has the commands that it adds to ``weft``.
"""
