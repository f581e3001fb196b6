"""Pictures of finished runs and of layouts, drawn with matplotlib."""
