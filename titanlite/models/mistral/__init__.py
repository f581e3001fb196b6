"""The Mistral family: the module, its spec and its Hugging Face mapping."""
