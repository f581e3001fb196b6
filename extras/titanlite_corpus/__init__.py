"""Make a corpus from raw text: read, filter, deduplicate, tokenise, shuffle, pack, write shards."""
