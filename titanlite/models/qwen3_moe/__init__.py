"""The Qwen3 family with a mixture of experts."""
