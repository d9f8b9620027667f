"""Reference values of PyTorch, transformers and other tools, and the oracles that stand in for what is no library."""
