"""Run files and launch lines of training and serving frameworks, read as memcalc's own options.

One module a framework, each with a table of its keys; `read.py` puts several files together. Nothing is executed,
nothing is fetched, and no file is read but those that are named.
"""
