"""Somebody else's code: a model factory wrapped with base shapes, or a whole trainer run as a
command.

Enters: a function that builds a torch module of a shape; a command template and where it leaves its
metrics.
Leaves: models with numbers per parameter; results and curves as of any other run.
Promises: at the base shape a model is exactly what its factory builds; a command's processes end
with its worker.
Refuses: factories that ignore width, seed or depth, dropout, commands that do not receive what is
searched.
"""
