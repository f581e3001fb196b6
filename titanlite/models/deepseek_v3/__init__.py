"""The DeepSeek-V3 family: latent attention, and a mixture of experts."""
