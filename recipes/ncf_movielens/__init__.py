"""NCF (NeuMF) on MovieLens-20M, as in section 5 of Sahu et al., NeurIPS 2021 (arXiv:2108.00951)."""
