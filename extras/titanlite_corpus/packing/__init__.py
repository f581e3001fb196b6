"""Pack documents into windows of fixed length, so that few of them are truncated."""
