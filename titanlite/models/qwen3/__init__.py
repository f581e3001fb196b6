"""The dense Qwen3 family: the module, its spec and its Hugging Face mapping."""
