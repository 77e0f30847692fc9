"""`python -m tf_fusedrec.doctor`: prints what is installed and built, and trains ten steps on one and two processes.

Its output belongs at the top of every bug report. The exit code is 0 if everything installed works, else 1.
"""
