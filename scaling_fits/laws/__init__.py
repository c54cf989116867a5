"""Scaling laws: loss as a function of parameters and tokens; tables of runs, forms, and the search
for a fit.

Enters:   tables of runs.
Leaves:   fitted laws with their residuals and outliers.
Promises: never a lone start; suspicious units are named.
Refuses:  tables that identify no law.
"""
