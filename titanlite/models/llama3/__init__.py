"""Llama 3: the module, its spec and its Hugging Face mapping."""
