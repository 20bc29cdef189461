"""Code that the measuring scripts of this folder share: processes, counters, servers, and the load.

It needs Python 3.9 or newer with its standard library, Linux, and the programs that a script names
when they are missing.
"""
