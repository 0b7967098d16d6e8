"""Text in, token batches out."""
