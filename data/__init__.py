"""Text in, tokens out: tokenizer, `.tok` shards, loader, corpora."""
