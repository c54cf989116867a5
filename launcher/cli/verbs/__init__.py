"""The verbs of the command line, one module for each part of the work.

Enters:   the user's arguments, already parsed by click.
Leaves:   one JSON object with `--json`, else text for people, both on stdout; progress goes to
stderr.
Promises: heavy imports happen inside verbs, so that `--help` stays quick.
Refuses:  nothing by itself: errors of the packages become exit codes in
`forerun._launcher.cli.cli`.
"""
