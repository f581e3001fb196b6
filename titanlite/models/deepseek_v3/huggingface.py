"""DeepSeek-V3 as Hugging Face's DeepseekV3ForCausalLM."""

from __future__ import annotations
