"""Evidence that another trainer computes what titanlite computes, step by step."""
