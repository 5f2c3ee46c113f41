"""CogVideoX 1.0 and 1.5 (Zhipu AI, 2024): text- and image-to-video diffusion transformers over one joint sequence."""
