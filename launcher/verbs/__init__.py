"""The command line's verbs, one module for each part of the story.

Enters:   what the user typed, already parsed by click.
Leaves:   one JSON object with `--json`, else text for people, both on stdout; talk goes to stderr.
Promises: heavy imports happen inside verbs, so `--help` stays quick.
Refuses:  nothing by itself: errors of the packages become exit codes in `launcher.cli.cli`.
"""
