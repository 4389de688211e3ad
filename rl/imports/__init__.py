"""Reads the configuration of a run of TRL, verl, Tunix or OpenRLHF, and writes the same run for
Duet.

A *word* is a key of the other framework with its value. A file becomes words (`given.py`; scripts
of a shell by `shell.py`, which runs nothing), a word gets a fate (`draft.py`, by the rules of
`rules.py` and of one file for each framework), and the draft becomes a YAML file and a report
(`writing.py`).
"""
