"""The Mixtral family: Mistral's blocks with a mixture of experts."""
