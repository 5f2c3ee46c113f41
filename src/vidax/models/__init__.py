"""The model families, and the cards of the models that have names (`registry`)."""
