"""A small GPT on WikiText-2 with AdamW, for local training with a threshold on drift."""
