"""From noise to latents: grids of noise levels, solvers as tables of coefficients, guidance and seeded noise.

`sampler.Sampler` is the frozen config that chooses a solver (`solvers`) and a grid (`schedules`).
"""
