"""Text: tokenizers, chat templates, incremental detokenizing and stop strings."""
