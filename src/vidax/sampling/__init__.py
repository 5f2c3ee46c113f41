"""From noise to latents: sigma grids (`schedules`), solvers as tables of coefficients (`solvers`), both chosen in one frozen
config (`sampler`), classifier-free guidance (`guidance`) and seeded noise (`noise`)."""
