"""The device engine: plans on the streams of a GPU, and all that needs Triton."""
