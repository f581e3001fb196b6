"""Pictures of layouts, pipelines and plans, drawn with matplotlib."""
