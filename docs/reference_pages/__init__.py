"""Pages below docs/reference, made from the code: `make reference` writes them.

A test compares the pages with the code.

Enters:   the verbs as click has them, the plan's sections, the source of the records, and the
recorded shapes of `--json` answers.
Leaves:   `writing.PAGES`, which has a function for the text of each page.
Promises: the text does not depend on the terminal or its width; all sentences are from the code.
Refuses:  an environment variable that the code reads but no sentence explains, and the reverse.
"""
