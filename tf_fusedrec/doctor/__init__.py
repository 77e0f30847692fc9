"""`python -m tf_fusedrec.doctor`: prints what is installed and built, and trains ten steps on one and two processes.

Its output belongs at the top of every bug report. The exit code is 0 if all that is installed works, else 1.

  __main__.py   the report
  facts.py      versions, built features, kernels in use, GPUs
  ten_steps.py  the program of each process
  trial.py      starts that program, and names its failure
"""
