"""The GPT-2 family: the module, its spec and its Hugging Face mapping."""
