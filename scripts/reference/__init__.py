"""Reference values of PyTorch, transformers and other tools, and oracles written here for what no library has."""
