"""What the device engine takes for granted about a GPU, as questions that the GPU answers: ``weft
doctor --gpu`` asks them.
"""
