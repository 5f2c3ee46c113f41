"""Text and image encoders that model families share."""
