"""Reference values from PyTorch, transformers and other tools, and oracles where no library exists."""
