"""Model files, manifest, tokenizer and chat template: everything of a model but running it. No torch."""
