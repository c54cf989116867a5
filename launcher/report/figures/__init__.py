"""The report's figures: each is a pure function from `report.json` to one drawing.

Enters:   `report.json` as it was read.
Leaves:   SVG for the page, matplotlib figures for notebooks.
Promises: the same data give the same bytes.
Refuses:  nothing.
"""
