"""Memory, time, layouts and cost of a run, estimated without a GPU; dry run of one step."""
