"""Fine-tuning, preferences and reinforcement learning: objectives and data beside the trainer."""
