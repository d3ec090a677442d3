"""What weft gives to torch.compile."""
