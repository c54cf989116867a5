"""Tables that people have: files of any common dialect, the names of their columns, the numbers in
their cells.

Enters:   a file, a pipe, or a table in memory.
Leaves:   cells by column, and columns of numbers.
Promises: one reader, one list of names and one rule for numbers, for every command that reads a
table.
Refuses:  a cell, a name or a dialect that can be read in two ways.
"""
