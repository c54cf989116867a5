"""The user's own code: a model factory that is trained as a proxy, or a trainer run as a command.

Enters: a function that builds a torch module for a shape; a command template, and the place where
  the command writes its metrics.
Leaves: models with the numbers that each parameter is trained with; results and curves like those
  of any other run.
Promises: at the base shape a model is exactly what its factory builds; the processes of a command
  end with its worker.
Refuses: factories that ignore the width, depth or seed; dropout; commands that do not receive the
  searched hyperparameters.
"""
