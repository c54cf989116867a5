"""Initial values, learning rates, and weight decay of every parameter at every width and depth.

Enters:   the rules of a parametrization (`forerun._proxies.core.rules`), a shape, and its base
shape.
Leaves:   plain numbers per parameter, and forward multipliers.
Promises: at the base shape all parametrizations are the same function; `mup` equals the package
          mup, tensor by tensor.
Refuses:  sizes that cannot be compared with those of the base shape.
"""
