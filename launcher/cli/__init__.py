"""The command line: parsing, shared options, exit codes, completion.

Enters:   what the user typed.
Leaves:   a verb's answer on stdout, talk on stderr, an exit code.
Promises: `--help` loads nothing heavy; errors are plain sentences.
Refuses:  options that contradict each other, all at once.
"""
