"""Between text and token ids: templates, tokenizers, stop strings, tool calls. Imports no torch."""
