"""The command line: one module per command, each of which parses, calls one function and renders.

Modules here import nothing heavy at the top, so that ``graphtune --help`` stays fast.
"""
