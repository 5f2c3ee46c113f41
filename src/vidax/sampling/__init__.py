"""From noise to latents: sigma grids, solvers as tables of coefficients, guidance and seeded noise.

`sampler.Sampler` is the frozen config that chooses a solver (`solvers`) and a sigma grid (`schedules`).
"""
