"""Where to cut the chain of blocks into stages."""
