"""Video generation with open video diffusion models in JAX."""
