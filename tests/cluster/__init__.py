"""Several hosts on one machine, with ssh and Slurm between them, and what goes wrong there."""
