"""LSTM on WikiText-2, as in section 5 of Sahu et al., NeurIPS 2021 (arXiv:2108.00951)."""
