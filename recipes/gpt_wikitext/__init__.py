"""A small GPT on WikiText-2 with AdamW: what local training and its threshold on drift are for."""
