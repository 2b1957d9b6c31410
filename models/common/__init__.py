"""What the video models share; nothing here knows a single model."""
