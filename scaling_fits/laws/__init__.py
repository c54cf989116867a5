"""Scaling laws of loss as a function of parameters and tokens: tables of runs, forms of laws, and
the search for a fit.

Enters:   tables of runs.
Leaves:   fitted laws with their residuals and outliers.
Promises: every fit uses several starting points; suspicious units are named.
Refuses:  tables that identify no law.
"""
