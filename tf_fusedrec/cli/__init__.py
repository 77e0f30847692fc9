"""The program `fusedrec`: main.py reads the command line, and each command is a module of its name."""
