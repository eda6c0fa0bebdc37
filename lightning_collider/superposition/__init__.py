"""Token-Superposition Training (arXiv 2605.06546): first bags of tokens, then single tokens."""
