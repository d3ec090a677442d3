"""A graph pass for torch.compile that inserts weft's fused operators."""
