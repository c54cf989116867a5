"""Tables that people have: files of any common dialect, names of columns, and numbers in cells.

Enters:   a file, a pipe, or a table in memory.
Leaves:   cells by column, and columns of numbers.
Promises: one reader (`table_files`), one list of names (`columns`), and one rule for numbers
          (`numerals`), for every command that reads a table.
Refuses:  a cell, a name, or a dialect with two readings.
"""
