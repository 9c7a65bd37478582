"""Decision problems that are solved first and played afterwards.

`draw` samples parameters and `solvers` solve them; what they found fixes the reward before
`environment` makes an episode of the same parameters. The environment never imports a solver.
"""
