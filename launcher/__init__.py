"""The launcher leads from a plan to the main run, in four layers: main_run, study, report, cli.

Enters:   a plan (TOML), and through it the results of every other room.
Leaves:   a frozen launch config with its attestations, a trainer's own files, a report.
Promises: the same results freeze the same digest; every number says where it came from.
Refuses:  a failed gate that nobody accepted with a reason, an edited config, a second driver on a
study.
"""
