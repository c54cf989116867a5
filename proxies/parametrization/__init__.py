"""How initial values, learning rates and weight decay scale with width and depth (muP and others).

Enters:   a parametrization's rules (`proxies.core.rules`), a shape and its base shape.
Leaves:   plain numbers per parameter and forward multipliers.
Promises: at the base shape every parametrization is the same function; `mup` is matched tensor by
tensor.
Refuses:  a parameter whose role is not known.
"""
