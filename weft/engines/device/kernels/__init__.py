"""Device code in Triton and its Gluon sister, one kernel per file; only these files need Triton."""
