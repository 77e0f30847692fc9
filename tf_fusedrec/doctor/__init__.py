"""Reports what is installed and built, and trains ten steps on one and two processes: `fusedrec doctor`."""
