"""Wan 2.1 (Alibaba, 2025): text-to-video diffusion transformer with a causal video autoencoder."""
