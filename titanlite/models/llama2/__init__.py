"""The Llama 2 family: the flavors of Llama 2; module and mapping are those of Llama 3."""
