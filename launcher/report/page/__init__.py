"""The report (`report.json` and a static page drawn from it), and the comparison of two reports.

Enters:   a study's findings.
Leaves:   `report.json`, `report.html`, `compare.json`, `compare.html`.
Promises: the page says nothing that `report.json` lacks; the same body gives the same bytes.
Refuses:  two studies that cannot be compared.
"""
